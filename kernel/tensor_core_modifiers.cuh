// Softcap, ALiBi and masks in the tensor-core body. Fragment coordinates: see tensor_core_steps.cuh.
#pragma once

#include "mask.h"
#include "score.h"
#include "tensor_core_steps.cuh"

namespace single_query {

// What modifies the scores of a piece, for this lane's heads; loaded ahead of use.
template <class Shape>
struct LaneModifiers {
  float slope[Shape::head_blocks][2];
  float mask[Shape::head_blocks][4]; // of the coming step

  __device__ __forceinline__ void load_slopes(const AttentionProblem& problem, const Piece& piece, const Heads& heads) {
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = block * 8 + threadIdx.x % 4 * 2 + h;
        slope[block][h] = alibi_slope(problem, piece.batch, heads.first_query_head + min(head, heads.count - 1));
      }
    }
  }

  __device__ __forceinline__ void load_mask(const AttentionProblem& problem, const Piece& piece, const Heads& heads,
                                            std::uint32_t first_key) {
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = block * 8 + threadIdx.x % 4 * 2 + i % 2;
        const std::uint32_t key = first_key + threadIdx.x % 32 / 4 + i / 2 * 8;
        const bool used = head < heads.count && key < piece.keys.end;
        mask[block][i] = used ? mask_value(problem, piece.batch, heads.first_query_head + head, key) : 0.0f;
      }
    }
  }

  // Scores from dot products; excluded ones are -inf. Returns a bit for each of this lane's scores (4 a block) that the
  // mask excludes.
  __device__ __forceinline__ unsigned apply(const AttentionProblem& problem, const Piece& piece,
                                            std::uint32_t first_key, float (&scores)[Shape::head_blocks][4]) const {
    unsigned excluded = 0;
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t key = first_key + threadIdx.x % 32 / 4 + i / 2 * 8;
        const float distance = static_cast<float>(static_cast<int>(key - (piece.length - 1)));
        if (mask[block][i] == negative_infinity) {
          excluded |= 1u << (block * 4 + i);
          scores[block][i] = negative_infinity;
        } else {
          scores[block][i] = modified_score({problem.scale, problem.softcap, slope[block][i % 2]}, scores[block][i],
                                            distance, mask[block][i]);
        }
      }
    }
    return excluded;
  }
};

// A weight of 0 does not keep an excluded key's NaN or infinity out of a product. Where a key that is excluded for some
// head has such a value, add its row by hand for the heads that it is not excluded for, then clear the row.
template <class Shape>
__device__ __forceinline__ void shield_excluded_values(bool half, unsigned char* value_tile, unsigned excluded,
                                                       const float (&weights)[Shape::head_blocks][4],
                                                       TensorCoreState<Shape>& state) {
  using Ring = typename Shape::Ring;
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
    for (int chunk = lane; chunk < Shape::padded_dim / 2; chunk += 32) {
      const std::uint32_t pair =
          *reinterpret_cast<std::uint32_t*>(Ring::chunk_address(value_tile, key, chunk / 4) + chunk % 4 * 4);
      finite = finite && (pair & exponent) != exponent && (pair >> 16 & exponent) != exponent;
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
              const void* value = Ring::chunk_address(value_tile, key, dim / 8) + dim % 8 * 2;
              state.output[block][m][upper * 2 + h] +=
                  weight * (half ? to_float(*static_cast<const __half*>(value))
                                 : to_float(*static_cast<const __nv_bfloat16*>(value)));
            }
          }
        }
      }
    }
    __syncwarp();
    for (int chunk = lane; chunk < Shape::padded_dim / 2; chunk += 32) {
      *reinterpret_cast<std::uint32_t*>(Ring::chunk_address(value_tile, key, chunk / 4) + chunk % 4 * 4) = 0;
    }
    __syncwarp();
  }
}

} // namespace single_query
