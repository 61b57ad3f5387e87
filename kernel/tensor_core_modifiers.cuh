// Softcap, ALiBi and masks in the tensor-core body. Fragment coordinates: see tensor_core_steps.cuh.
#pragma once

#include "mask.h"
#include "score.h"
#include "tensor_core_steps.cuh"

namespace single_query {

// What modifies the scores of a piece, for this lane's heads.
template <class Shape>
struct LaneModifiers {
  float inverse_softcap;
  float slope[Shape::head_blocks][2];
  std::int64_t mask_row[Shape::head_blocks][2];   // where the heads' rows of the mask begin, in elements
  std::uint32_t mask[Shape::head_blocks][4] = {}; // of the coming step, as stored: read a step ahead of its use

  __device__ __forceinline__ void begin_piece(const AttentionProblem& problem, const Piece& piece, const Heads& heads) {
    inverse_softcap = inverse_softcap_of(problem.softcap);
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Heads that are not there repeat the last one.
        const std::int64_t query_head =
            heads.first_query_head + min(block * 8 + static_cast<int>(threadIdx.x % 4) * 2 + h, heads.count - 1);
        slope[block][h] = alibi_slope(problem, piece.batch, query_head);
        mask_row[block][h] = piece.batch * problem.mask_stride_batch + query_head * problem.mask_stride_head;
      }
    }
  }

  // first_key: of the coming step.
  __device__ __forceinline__ void load_mask(const AttentionProblem& problem, const Piece& piece,
                                            std::uint32_t first_key) {
    if (problem.attn_mask == nullptr) {
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t key = first_key + threadIdx.x % 32 / 4 + i / 2 * 8;
      const std::int64_t at = static_cast<std::int64_t>(key) * problem.mask_stride_key;
#pragma unroll
      for (int block = 0; block < Shape::head_blocks; ++block) {
        if (is_in(piece.keys, key)) {
          mask[block][i] = mask_bits(problem, mask_row[block][i % 2] + at);
        }
      }
    }
  }

  // Scores from dot products; excluded ones are -inf. Returns a bit for each of this lane's scores (4 a block) that the
  // mask excludes.
  __device__ __forceinline__ unsigned apply(const AttentionProblem& problem, const Piece& piece,
                                            std::uint32_t first_key, float (&scores)[Shape::head_blocks][4]) const {
    unsigned excluded = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t key = first_key + threadIdx.x % 32 / 4 + i / 2 * 8;
      const float distance = static_cast<float>(static_cast<int>(key - (piece.length - 1)));
#pragma unroll
      for (int block = 0; block < Shape::head_blocks; ++block) {
        const float added = problem.attn_mask == nullptr ? 0.0f : mask_number(problem.mask_type, mask[block][i]);
        const float score = modified_score({problem.scale, problem.softcap, slope[block][i % 2], inverse_softcap},
                                           scores[block][i], distance, added);
        const bool masked = added == negative_infinity;
        excluded |= masked && is_in(piece.keys, key) ? 1u << (block * 4 + i) : 0u;
        scores[block][i] = masked ? negative_infinity : score;
      }
    }
    return excluded;
  }
};

// Whether a tile of values has a NaN or an infinity: only then its product with zeros is not zero.
template <class Shape, bool half>
__device__ __forceinline__ bool any_not_finite(const unsigned char* value_tile, const MatrixRows& rows) {
  float products[2][4] = {}; // two independent chains of additions
#pragma unroll
  for (int m = 0; m < Shape::dim_steps; ++m) {
    std::uint32_t values[4];
    load_matrices<true>(values, rows.template address<typename Shape::Ring>(value_tile, m));
    multiply_add<half>(products[m % 2], values, 0u, 0u);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += products[0][i] + products[1][i];
  }
  return __any_sync(0xffffffffu, sum != 0);
}

// A weight of 0 does not keep an excluded key's NaN or infinity out of a product. Where a key that is excluded for some
// head has such a value, add its row by hand for the heads that it is not excluded for, then clear the row.
template <class Shape>
__device__ __forceinline__ void shield_excluded_values(bool half, unsigned char* value_tile, unsigned excluded,
                                                       const float (&weights)[Shape::head_blocks][4],
                                                       TensorCoreState<Shape>& state) {
  using Tile = typename Shape::Ring::Tile;
  const unsigned exponent = half ? 0x7c00u : 0x7f80u;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int key = 0; key < step_keys; ++key) {
    const unsigned key_bits = key < 8 ? 0x33333333u : 0xccccccccu; // this lane's scores of key lane / 4 (+ 8)
    const unsigned of_key = __ballot_sync(0xffffffffu, lane / 4 == key % 8 && (excluded & key_bits) != 0);
    if (of_key == 0) {
      continue;
    }
    bool finite = true;
    for (int pair = lane; pair < Shape::padded_dim / 2; pair += 32) {
      const std::uint32_t bits = *reinterpret_cast<std::uint32_t*>(value_tile + Tile::byte_offset(key, pair * 4));
      finite = finite && (bits & exponent) != exponent && (bits >> 16 & exponent) != exponent;
    }
    if (__all_sync(0xffffffffu, finite)) {
      continue;
    }
    const int source = key % 8 * 4 + lane % 4; // the lane that has this key's weights for this lane's heads
    const unsigned excluded_here = __shfl_sync(0xffffffffu, excluded, source);
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = __shfl_sync(0xffffffffu, weights[block][h], source);
        const float high = __shfl_sync(0xffffffffu, weights[block][2 + h], source);
        const int i = key < 8 ? h : 2 + h;
        const float weight = (key < 8 ? low : high) * value_scale(half);
        if ((excluded_here >> (block * 4 + i) & 1) == 0) {
#pragma unroll
          for (int m = 0; m < Shape::dim_steps; ++m) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
              const int dim = m * 16 + upper * 8 + lane / 4;
              const void* value = value_tile + Tile::byte_offset(key, dim * 2);
              state.output[block][m][upper * 2 + h] +=
                  weight * (half ? to_float(*static_cast<const __half*>(value))
                                 : to_float(*static_cast<const __nv_bfloat16*>(value)));
            }
          }
        }
      }
    }
    __syncwarp();
    for (int pair = lane; pair < Shape::padded_dim / 2; pair += 32) {
      *reinterpret_cast<std::uint32_t*>(value_tile + Tile::byte_offset(key, pair * 4)) = 0;
    }
    __syncwarp();
  }
}

} // namespace single_query
