// The tensor-core kernel body: float16 and bfloat16, every head_dim, stride and alignment. The type is a run-time value,
// since only the matrix instruction and the rounding of weights depend on it.
//
// Keys are the M = 16 side of mma.m16n8k16 and query heads the N = 8 side, so that a group of up to 8 heads per
// key/value head wastes nothing and every cache byte is read once:
//     scores [16 keys x 8 heads] = K tile [16 x D] . queries [D x 8]
//     output [D x 8 heads]      += V tile^T [D x 16] . weights [16 x 8]
// Each warp takes steps of 16 keys on its own: wait for its K tile, multiply, start the copy of a later K tile, softmax,
// wait for its V tile, multiply, start the copy of a later V tile. Warps meet only at the end of a piece.
//
// Fragment coordinates of lane l: g = l / 4, c = l % 4. In scores, [0] [1] are key g, heads 2c, 2c + 1 and [2] [3] key
// g + 8; in the output, [0] [1] are dim 16 m + g and [2] [3] dim 16 m + g + 8.
#pragma once

#include "cache_ring.cuh"
#include "mask.h"
#include "merge_partials.cuh"
#include "score.h"
#include "tensor_core_instructions.cuh"

namespace single_query {

template <int padded_dim_, int head_blocks_>
struct TensorCoreShape {
  static constexpr int padded_dim = padded_dim_;   // head_dim rounded up: 64, 128 or 256
  static constexpr int head_blocks = head_blocks_; // blocks of 8 query heads in a tile: 1 or 2
  static constexpr int tile_heads = 8 * head_blocks;
  static constexpr int dim_steps = padded_dim / 16;
  using Ring = CacheRing<padded_dim>;
  static constexpr int head_shift = padded_dim == 64 ? 4 : padded_dim == 128 ? 5 : 6;
  static constexpr int staging_bytes = WarpStates::floats(tile_heads, head_shift) * static_cast<int>(sizeof(float));
  static_assert(staging_bytes <= Ring::warp_bytes, "a drained ring has to hold its warp's states");

  static constexpr int shared_bytes(const SplitPlan& plan) {
    const int area = plan.walk ? plan.warps * staging_bytes
                     : plan.cluster_size > 1
                         ? ClusterMailbox::bytes(tile_heads << head_shift, plan.cluster_size, plan.warps)
                         : 0;
    return plan.warps * Ring::warp_bytes + area;
  }
};

// The state of one warp: the softmax of the keys it has seen, for the heads of its tile.
template <class Shape>
struct TensorCoreState {
  float max_score[Shape::head_blocks][2];
  float sum_exp[Shape::head_blocks][2]; // of this lane's keys only
  float output[Shape::head_blocks][Shape::dim_steps][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
      max_score[block][0] = max_score[block][1] = negative_infinity;
      sum_exp[block][0] = sum_exp[block][1] = 0;
#pragma unroll
      for (int m = 0; m < Shape::dim_steps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          output[block][m][i] = 0;
        }
      }
    }
  }
};

// Two consecutive query elements as they enter the matrix instruction; zeros past head_dim.
__device__ __forceinline__ std::uint32_t query_pair(const Element* row, int dim, int head_dim, bool pairs) {
  if (pairs && dim + 1 < head_dim) {
    return __ldg(reinterpret_cast<const std::uint32_t*>(row + dim));
  }
  const std::uint32_t low = dim < head_dim ? __ldg(row + dim) : 0;
  const std::uint32_t high = dim + 1 < head_dim ? __ldg(row + dim + 1) : 0;
  return low | high << 16;
}

// queries[block][2 k], [2 k + 1]: the B fragments of dims 16 k .. 16 k + 15, heads 8 block .. 8 block + 7. plain: pairs
// are aligned and none straddles head_dim.
template <class Shape, bool plain>
__device__ __forceinline__ void load_queries(const KernelArguments& args, const Piece& piece, const Heads& heads,
                                             std::uint32_t (&queries)[Shape::head_blocks][2 * Shape::dim_steps]) {
  const AttentionProblem& problem = args.problem;
  const int lane = threadIdx.x % 32;
  const int first_dim = lane % 4 * 2;
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
    const int head = block * 8 + lane / 4;
    const int head_dim = head < heads.count ? static_cast<int>(problem.head_dim) : 0;
    const Element* row = static_cast<const Element*>(problem.query) + piece.batch * problem.query_stride_batch +
                         (heads.first_query_head + head) * problem.query_stride_head;
    const auto* pairs = reinterpret_cast<const std::uint32_t*>(row + first_dim);
#pragma unroll
    for (int i = 0; i < 2 * Shape::dim_steps; ++i) {
      if (plain) {
        queries[block][i] = i * 8 + first_dim < head_dim ? __ldg(pairs + i * 4) : 0u;
      } else {
        queries[block][i] = query_pair(row, i * 8 + first_dim, head_dim, args.query_copy_bytes >= 4);
      }
    }
  }
}

template <class Shape, bool half>
__device__ __forceinline__ void multiply_keys(unsigned char* key_tile,
                                              const std::uint32_t (&queries)[Shape::head_blocks][2 * Shape::dim_steps],
                                              float (&scores)[Shape::head_blocks][4]) {
  using Ring = typename Shape::Ring;
  const int lane = threadIdx.x % 32;
  const int row = lane % 16;
  float chains[2][Shape::head_blocks][4] = {}; // two independent chains of additions
#pragma unroll
  for (int k = 0; k < Shape::dim_steps; ++k) {
    std::uint32_t keys[4];
    load_matrices<false>(keys, Ring::chunk_address(key_tile, row, 2 * k + lane / 16));
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
      multiply_add<half>(chains[k % 2][block], keys, queries[block][2 * k], queries[block][2 * k + 1]);
    }
  }
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[block][i] = chains[0][block][i] + chains[1][block][i];
    }
  }
}

template <class Shape, bool half>
__device__ __forceinline__ void multiply_values(unsigned char* value_tile,
                                                const std::uint32_t (&weights)[Shape::head_blocks][2],
                                                TensorCoreState<Shape>& state) {
  using Ring = typename Shape::Ring;
  const int lane = threadIdx.x % 32;
  const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int m = 0; m < Shape::dim_steps; ++m) {
    std::uint32_t values[4];
    load_matrices<true>(values, Ring::chunk_address(value_tile, row, 2 * m + lane / 8 % 2));
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
      multiply_add<half>(state.output[block][m], values, weights[block][0], weights[block][1]);
    }
  }
}

// Bring the state to the step's maximum and turn scores into weights.
template <class Shape>
__device__ __forceinline__ void softmax_step(float (&scores)[Shape::head_blocks][4], TensorCoreState<Shape>& state) {
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(scores[block][h], scores[block][2 + h]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], offset));
      }
      largest[h] = fmaxf(state.max_score[block][h], largest[h]);
    }
    if (__any_sync(0xffffffffu, largest[0] > state.max_score[block][0] || largest[1] > state.max_score[block][1])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = softmax_weight(state.max_score[block][h], largest[h]);
        state.max_score[block][h] = largest[h];
        state.sum_exp[block][h] *= factor;
#pragma unroll
        for (int m = 0; m < Shape::dim_steps; ++m) {
          state.output[block][m][h] *= factor;
          state.output[block][m][2 + h] *= factor;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[block][i] = softmax_weight(scores[block][i], state.max_score[block][i % 2]);
      state.sum_exp[block][i % 2] += scores[block][i];
    }
  }
}

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

// Leave this warp's state in shared memory, summed over the warp's lanes.
template <class Shape>
__device__ __forceinline__ void stage_state(const WarpStates& warps, const TensorCoreState<Shape>& state) {
  const int lane = threadIdx.x % 32;
  const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = block * 8 + lane % 4 * 2 + h;
      float sum = state.sum_exp[block][h];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      if (lane / 4 == 0) {
        warps.state(warp, head) = make_float2(state.max_score[block][h], sum);
      }
      float* const values = warps.values(warp, head) + lane / 4;
#pragma unroll
      for (int m = 0; m < Shape::dim_steps; ++m) {
        values[m * 16] = state.output[block][m][h];
        values[m * 16 + 8] = state.output[block][m][2 + h];
      }
    }
  }
}

// grid and pieces: see split_plan.h. Dynamic shared memory: the warps' rings, then staging (walk: the rings are busy
// with what comes next) or the cluster's mailbox.
// plain: by row, contiguous, aligned to 16 bytes, no lengths, no modifiers: the same body with little code, because a
// short problem takes about as long as its instructions take to arrive.
template <class Shape, bool plain>
__global__ void __launch_bounds__(256, 1) tensor_core_attention(const __grid_constant__ KernelArguments args) {
  using Ring = typename Shape::Ring;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionProblem& problem = args.problem;
  const bool half = problem.dtype == DataType::float16;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warps = args.plan.warps;
  const int cluster_size = args.plan.cluster_size;
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  const bool walk = !plain && args.plan.walk;
  const bool modified = !plain && args.modified;
  Pieces<plain> pieces(args);
  if (pieces.done()) {
    return; // the same for all blocks of a cluster
  }
  unsigned char* const ring = shared + warp * Ring::warp_bytes;
  unsigned char* const area = shared + warps * Ring::warp_bytes;
  const std::uint32_t first_key = (rank * warps + warp) * step_keys;
  const std::uint32_t stride = cluster_size * warps * step_keys;
  CacheReader<Shape::padded_dim, plain> reader(args, ring, pieces, first_key, stride);
  TensorCoreState<Shape> state;
  LaneModifiers<Shape> modifiers;
  Piece piece;
  int stage = 0;
  for (bool first = true; pieces.next(piece); first = false) {
    const Heads heads = heads_of(args, piece.row_in_batch);
    if (first) {
      reader.template copy_keys<false>(0);
    } else {
      __syncthreads(); // staging is free again
    }
    std::uint32_t queries[Shape::head_blocks][2 * Shape::dim_steps];
    load_queries<Shape, plain>(args, piece, heads, queries);
    if (first) {
#pragma unroll 1
      for (int ahead = 0; ahead < Ring::stages; ++ahead) {
        if (ahead > 0) {
          reader.template copy_keys<false>(ahead);
        }
        reader.template copy_values<false>(ahead);
        reader.advance();
      }
#if __CUDA_ARCH__ >= 900
      if (cluster_size > 1) {
        open_mailbox(ClusterMailbox(area, heads.count << Shape::head_shift, cluster_size, warps), cluster_size);
      }
#endif
    }
    state.clear();
    if (modified) {
      modifiers.load_slopes(problem, piece, heads);
    }
#pragma unroll 1
    for (std::uint32_t key = piece.keys.begin + first_key; key < piece.keys.end; key += stride) {
      if (modified) {
        modifiers.load_mask(problem, piece, heads, key);
      }
      __pipeline_wait_prior(Ring::in_flight);
      __syncwarp();
      float scores[Shape::head_blocks][4];
      if (half) {
        multiply_keys<Shape, true>(Ring::key_tile(ring, stage), queries, scores);
      } else {
        multiply_keys<Shape, false>(Ring::key_tile(ring, stage), queries, scores);
      }
      const bool missing = reader.misses_page(stage);
      __syncwarp(); // all lanes have read the tile
      reader.template copy_keys<true>(stage);
      unsigned excluded = 0;
      if (modified) {
        excluded = modifiers.apply(problem, piece, key, scores);
      }
#pragma unroll
      for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!modified) {
            scores[block][i] *= problem.scale;
          }
          const bool past_end = key + threadIdx.x % 32 / 4 + i / 2 * 8 >= piece.keys.end;
          scores[block][i] = past_end ? negative_infinity : missing ? __int_as_float(0x7fffffff) : scores[block][i];
        }
      }
      softmax_step<Shape>(scores, state);
      __pipeline_wait_prior(Ring::in_flight);
      __syncwarp();
      unsigned char* const value_tile = Ring::value_tile(ring, stage);
      if (modified) {
        if (__any_sync(0xffffffffu, excluded != 0)) {
          shield_excluded_values<Shape>(half, value_tile, excluded, scores, state);
        }
      }
      std::uint32_t weights[Shape::head_blocks][2];
#pragma unroll
      for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weights[block][i] = transpose_matrix(
              pack_pair(half, scores[block][2 * i] * value_scale(half), scores[block][2 * i + 1] * value_scale(half)));
        }
      }
      if (half) {
        multiply_values<Shape, true>(value_tile, weights, state);
      } else {
        multiply_values<Shape, false>(value_tile, weights, state);
      }
      __syncwarp();
      reader.template copy_values<true>(stage);
      reader.advance();
      stage = stage + 1 == Ring::stages ? 0 : stage + 1;
    }
    // By row, this warp's ring has drained and holds its state; in a walk it holds the next piece's keys already.
    WarpStates states{reinterpret_cast<float*>(area), Shape::staging_bytes / 4, Shape::tile_heads, Shape::head_shift};
    if (!walk) {
      states.base = reinterpret_cast<float*>(shared);
      states.warp_stride = Ring::warp_bytes / 4;
      __pipeline_wait_prior(0);
      __syncwarp();
    }
    stage_state<Shape>(states, state);
    finish_piece(args, {piece, heads, piece.whole ? Cut{} : pieces.cut(piece), states, area});
  }
}

} // namespace single_query
