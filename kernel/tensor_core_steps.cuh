// The steps of the tensor-core body: shapes, registers, and what a warp does with a step of 16 keys.
//
// Fragment coordinates of lane l: g = l / 4, c = l % 4. In scores, [0] [1] are key g, heads 2c, 2c + 1 and [2] [3] key
// g + 8; in the output, [0] [1] are dim 16 m + g and [2] [3] dim 16 m + g + 8.
#pragma once

#include "cache_ring.cuh"
#include "merge_partials.cuh"
#include "tensor_core_instructions.cuh"

namespace single_query {

template <int padded_dim_, int head_blocks_, int tiles_at_once_ = 1>
struct TensorCoreShape {
  static constexpr int padded_dim = padded_dim_;   // head_dim rounded up: 64, 128 or 256
  static constexpr int head_blocks = head_blocks_; // blocks of 8 query heads in a tile: 1 or 2
  static constexpr int tile_heads = 8 * head_blocks;
  static constexpr int dim_steps = padded_dim / 16;
  // Groups may need many tiles: warps can form teams that share their keys, each warp with a tile of its own.
  static constexpr bool teams = head_blocks > 1 || padded_dim == 256;
  static constexpr int tiles_at_once = tiles_at_once_; // of the team's: 2 share a softmax step, which takes registers
  static_assert(tiles_at_once == 1 || teams);
  static constexpr int most_warps = 8;
  using Ring = CacheRing<padded_dim>;
  static constexpr int head_shift = padded_dim == 64 ? 4 : padded_dim == 128 ? 5 : 6;
  static constexpr int staging_bytes = WarpStates::floats(tile_heads, head_shift) * static_cast<int>(sizeof(float));
  static_assert(staging_bytes <= Ring::warp_bytes, "a drained ring has to hold its warp's states");

  static constexpr int shared_bytes(const SplitPlan& plan) {
    const int area = plan.walk ? plan.warps * staging_bytes
                     : plan.cluster_size > 1
                         ? ClusterMailbox::bytes(plan.team * tile_heads << head_shift, plan.cluster_size)
                         : 0;
    return plan.warps * Ring::warp_bytes + area;
  }
};

// The scores of the tiles that a warp takes at once, as fragments.
template <class Shape>
using Scores = float[Shape::tiles_at_once][Shape::head_blocks][4];

// The state of one warp: the softmax of the keys it has seen, for the heads of its tile.
template <class Shape>
struct TensorCoreState {
  float max_score[Shape::head_blocks][2]; // of a score that came by; others are larger by max_slack at most
  float reference[Shape::head_blocks][2]; // of the exponentials: max_score, or 0 where that is -inf
  float sum_exp[Shape::head_blocks][2];   // of this lane's keys only, and without those of the chain in hand
  float sum_chain[Shape::head_blocks][2]; // see add_chain()
  int chain_steps;
  int chains; // since the output was staged or cleared
  float output[Shape::head_blocks][Shape::dim_steps][4];

  __device__ __forceinline__ void clear() {
    chain_steps = chains = 0;
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
      max_score[block][0] = max_score[block][1] = negative_infinity;
      reference[block][0] = reference[block][1] = 0;
      sum_exp[block][0] = sum_exp[block][1] = 0;
      sum_chain[block][0] = sum_chain[block][1] = 0;
#pragma unroll
      for (int m = 0; m < Shape::dim_steps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          output[block][m][i] = 0;
        }
      }
    }
  }

  __device__ __forceinline__ void end_chain() {
    chain_steps = 0;
    ++chains;
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum_exp[block][h] = add_chain(sum_exp[block][h], sum_chain[block][h]);
      }
    }
  }
};

// Two consecutive query elements as they enter the matrix instruction; zeros before the first and past head_dim.
__device__ __forceinline__ std::uint32_t query_pair(const Element* row, int dim, int head_dim) {
  const std::uint32_t low = dim >= 0 && dim < head_dim ? __ldg(row + dim) : 0;
  const std::uint32_t high = dim >= -1 && dim + 1 < head_dim ? __ldg(row + dim + 1) : 0;
  return low | high << 16;
}

// queries[block][2 k], [2 k + 1]: the B fragments of dims 16 k .. 16 k + 15, heads 8 block .. 8 block + 7, of rows that
// begin with `early` zeros.
template <class Shape, Path path>
__device__ __forceinline__ void load_queries(const KernelArguments& args, const Piece& piece, const Heads& heads,
                                             int early,
                                             std::uint32_t (&queries)[Shape::head_blocks][2 * Shape::dim_steps]) {
  constexpr bool aligned = path != Path::spread && path != Path::general;
  const AttentionProblem& problem = args.problem;
  const int lane = threadIdx.x % 32;
  const int first_dim = lane % 4 * 2;
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
    const int head = block * 8 + lane / 4;
    const int head_dim = head < heads.count ? static_cast<int>(problem.head_dim) : 0;
    const Element* row = static_cast<const Element*>(problem.query) + piece.batch * problem.query_stride_batch +
                         (heads.first_query_head + head) * problem.query_stride_head;
    if (aligned || (args.query_copy_bytes == 16 && early == 0)) { // pairs are aligned and none straddles head_dim
      const auto* pairs = reinterpret_cast<const std::uint32_t*>(row + first_dim);
#pragma unroll
      for (int i = 0; i < 2 * Shape::dim_steps; ++i) {
        queries[block][i] = head_dim - first_dim > i * 8 ? __ldg(pairs + i * 4) : 0u;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * Shape::dim_steps; ++i) {
        queries[block][i] = query_pair(row, i * 8 + first_dim - early, head_dim);
      }
    }
  }
}

// Which bits of this lane's pair of a tile's first 8 dims are a key's, in tiles that begin `early` elements before it.
__device__ __forceinline__ std::uint32_t own_bits(int early) {
  const int dim = threadIdx.x % 4 * 2;
  return (dim >= early ? 0xffffu : 0u) | (dim + 1 >= early ? 0xffff0000u : 0u);
}

// Where this lane's row addresses for load_matrices lie in a tile: chunk 2 j (+ 1) of its row, for the four j of a
// panel of 64 dims; further panels follow at a fixed distance.
struct MatrixRows {
  int chunk[4];
  __device__ __forceinline__ MatrixRows(int row, int odd) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      chunk[j] = row * 128 + (((2 * j + odd) ^ (row % 8)) * 16);
    }
  }
  template <class Ring>
  __device__ __forceinline__ const void* address(const unsigned char* tile, int pair) const {
    return tile + chunk[pair % 4] + pair / 4 * Ring::Tile::panel_bytes;
  }
};

template <class Shape, bool half>
__device__ __forceinline__ void
multiply_keys_of(const unsigned char* first_tile, const MatrixRows& rows, std::uint32_t first_bits,
                 const std::uint32_t (&queries)[Shape::head_blocks][2 * Shape::dim_steps], Scores<Shape>& scores) {
  constexpr int tiles = Shape::tiles_at_once;
  float chains[2][tiles][Shape::head_blocks][4] = {}; // two independent chains of additions each
#pragma unroll
  for (int k = 0; k < Shape::dim_steps; ++k) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      std::uint32_t keys[4];
      load_matrices<false>(
          keys, rows.template address<typename Shape::Ring>(first_tile + tile * Shape::Ring::warp_bytes, k));
      if (k == 0) {
        keys[0] &= first_bits;
        keys[1] &= first_bits;
      }
#pragma unroll
      for (int block = 0; block < Shape::head_blocks; ++block) {
        multiply_add<half>(chains[k % 2][tile][block], keys, queries[block][2 * k], queries[block][2 * k + 1]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[tile][block][i] = chains[0][tile][block][i] + chains[1][tile][block][i];
      }
    }
  }
}

// The tiles that a warp takes at once lie in neighbouring warps' rings. first_bits: see own_bits().
template <class Shape>
__device__ __forceinline__ void multiply_keys(bool half, const unsigned char* first_tile, const MatrixRows& rows,
                                              std::uint32_t first_bits,
                                              const std::uint32_t (&queries)[Shape::head_blocks][2 * Shape::dim_steps],
                                              Scores<Shape>& scores) {
  if (half) {
    multiply_keys_of<Shape, true>(first_tile, rows, first_bits, queries, scores);
  } else {
    multiply_keys_of<Shape, false>(first_tile, rows, first_bits, queries, scores);
  }
}

template <class Shape, bool half>
__device__ __forceinline__ void multiply_values_of(const unsigned char* value_tile, const MatrixRows& rows,
                                                   const std::uint32_t (&weights)[Shape::head_blocks][2],
                                                   TensorCoreState<Shape>& state) {
#pragma unroll
  for (int m = 0; m < Shape::dim_steps; ++m) {
    std::uint32_t values[4];
    load_matrices<true>(values, rows.template address<typename Shape::Ring>(value_tile, m));
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
      multiply_add<half>(state.output[block][m], values, weights[block][0], weights[block][1]);
    }
  }
}

template <class Shape>
__device__ __forceinline__ void multiply_values(bool half, const unsigned char* value_tile, const MatrixRows& rows,
                                                const std::uint32_t (&weights)[Shape::head_blocks][2],
                                                TensorCoreState<Shape>& state) {
  if (half) {
    multiply_values_of<Shape, true>(value_tile, rows, weights, state);
  } else {
    multiply_values_of<Shape, false>(value_tile, rows, weights, state);
  }
}

template <class Shape>
__device__ __forceinline__ void scale_scores(float scale, float (&scores)[Shape::head_blocks][4]) {
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[block][i] *= scale;
    }
  }
}

// Scores of keys that are not in the piece become -inf, others NaN if their page does not exist. missing: a bit for
// each of the step's keys; excluded: one for each of this lane's scores, of keys whose page is not asked for.
template <class Shape, Path path>
__device__ __forceinline__ void replace_scores(KeyRange keys, std::uint32_t first_key, unsigned missing,
                                               unsigned excluded, float (&scores)[Shape::head_blocks][4]) {
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned row = threadIdx.x % 32 / 4 + i / 2 * 8;
      const bool in_piece = is_in(keys, first_key + (row << spread_shift<path>));
      const bool lost = (missing >> row & 1) != 0 && (excluded >> (block * 4 + i) & 1) == 0;
      scores[block][i] = !in_piece ? negative_infinity : lost ? __int_as_float(0x7fffffff) : scores[block][i];
    }
  }
}

// Bring the state to maxima that include the step's.
template <class Shape>
__device__ __forceinline__ void raise_maxima(const Scores<Shape>& scores, TensorCoreState<Shape>& state) {
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = negative_infinity;
#pragma unroll
      for (int tile = 0; tile < Shape::tiles_at_once; ++tile) {
        largest = fmaxf(largest, fmaxf(scores[tile][block][h], scores[tile][block][2 + h]));
      }
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      }
      largest = fmaxf(state.max_score[block][h], largest);
      const float factor = softmax_weight(state.max_score[block][h], largest);
      state.max_score[block][h] = largest;
      state.reference[block][h] = largest == negative_infinity ? 0.0f : largest;
      state.sum_exp[block][h] *= factor;
      state.sum_chain[block][h] *= factor;
#pragma unroll
      for (int m = 0; m < Shape::dim_steps; ++m) {
        state.output[block][m][h] *= factor;
        state.output[block][m][2 + h] *= factor;
      }
    }
  }
}

constexpr int state_chain_steps = chain_length / 2; // of two keys a lane
constexpr float max_slack = 1.38f;                  // weights of up to 4

// Turn the tiles' scores into weights. The maxima are raised only for scores that would get weights above 4: in a row
// of scores of any order that is seldom, where larger scores alone come by all the time.
template <class Shape>
__device__ __forceinline__ void softmax_step(Scores<Shape>& scores, TensorCoreState<Shape>& state) {
  bool larger = false;
#pragma unroll
  for (int tile = 0; tile < Shape::tiles_at_once; ++tile) {
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        larger = larger || scores[tile][block][i] > state.max_score[block][i % 2] + max_slack;
      }
    }
  }
  if (__any_sync(0xffffffffu, larger)) {
    raise_maxima<Shape>(scores, state);
  }
#pragma unroll
  for (int tile = 0; tile < Shape::tiles_at_once; ++tile) {
#pragma unroll
    for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[tile][block][i];
        score = fast_exp(score - state.reference[block][i % 2]); // to be rounded to 16 bits
        state.sum_chain[block][i % 2] += score;
      }
    }
  }
  state.chain_steps += Shape::tiles_at_once;
  if (state.chain_steps == state_chain_steps) {
    state.end_chain();
  }
}

// A tile's weights as B fragments.
template <class Shape>
__device__ __forceinline__ void pack_weights(bool half, const float (&scores)[Shape::head_blocks][4],
                                             std::uint32_t (&weights)[Shape::head_blocks][2]) {
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weights[block][i] = transpose_matrix(
          pack_pair(half, scores[block][2 * i] * value_scale(half), scores[block][2 * i + 1] * value_scale(half)));
    }
  }
}

// Leave this warp's state in shared memory, summed over the warp's lanes. staged: the output of earlier steps has been
// left there, which this adds to. What that rounds off stays in `state`, see add_chain(), and can go on from there.
// early: dims in front that are left out.
template <class Shape>
__device__ __forceinline__ void stage_state(const WarpStates& warps, bool staged, int early,
                                            TensorCoreState<Shape>& state) {
  const int lane = threadIdx.x % 32;
  const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int block = 0; block < Shape::head_blocks; ++block) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = block * 8 + lane % 4 * 2 + h;
      float sum = state.sum_exp[block][h] + state.sum_chain[block][h];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      float factor = 0;
      if (staged) {
        factor = softmax_weight(warps.state(warp, head).x, state.max_score[block][h]);
        __syncwarp(); // all lanes have read
      }
      if (lane / 4 == 0) {
        warps.state(warp, head) = make_float2(state.max_score[block][h], sum);
      }
      float* const values = warps.values(warp, head) + lane / 4 - early;
#pragma unroll
      for (int m = 0; m < Shape::dim_steps; ++m) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          if (m + upper == 0 && lane / 4 < early) {
            continue;
          }
          float& value = values[m * 16 + upper * 8];
          float& output = state.output[block][m][upper * 2 + h];
          value = staged ? add_chain(value * factor, output) : output;
          output = staged ? output : 0.0f;
        }
      }
    }
  }
  state.chains = 0;
  __syncwarp();
}

} // namespace single_query
