// The SIMT kernel body where every warp has one step at most: one query head per key/value head and few keys, of every
// dtype. Such a problem takes about as long as its chain of instructions, so there is no loop, and the shape of the
// block is known at compile time. Lengths, pages, masks and rows of any alignment are for the general variant, which
// does the same arithmetic in the same order: the bits of a row do not depend on how its keys were given.
//
// Eight lanes share a key, as in simt_attention.cuh. A warp refers its weights to its largest score and spreads its
// state over its lanes; then a block, or the block of the cluster that owns a slice of the output, folds the warps.
#pragma once

#include "mask.h"
#include "merge_partials.cuh"
#include "score.h"

namespace single_query {

template <typename Scalar_, int vectors_, int warps_, int rows_, int cluster_size_, bool general_ = false>
struct SingleStepShape {
  using Scalar = Scalar_;
  static constexpr bool general = general_;
  static constexpr int vectors = vectors_; // of four dims a lane
  static constexpr int warps = warps_;     // of a block
  static constexpr int rows = rows_;       // keys of a lane
  static constexpr int cluster_size = cluster_size_;
  static constexpr int padded_dim = 32 * vectors;
  static constexpr int sources = cluster_size * warps;
  static constexpr int most_keys = 4 * rows * sources;
  static constexpr int slice = padded_dim / cluster_size; // dims of a block
  // Fold: `dims` dims of a warp, each in 32 / dims lanes that take lane_sources of the sources each.
  static constexpr int dims = cluster_size == 1 ? 32 : slice < 8 ? slice : 8;
  static constexpr int lane_sources = sources * dims / 32;
};

// The first line of constant memory holds what the loads need. Strides of rows in bytes, others in elements.
struct SingleStepArguments {
  const void* query; // [batch, head, head_dim]
  const void* key;   // [batch, head, keys, head_dim]
  const void* value; // [batch, head, keys, head_dim]
  std::uint32_t key_row_bytes, value_row_bytes;
  std::uint32_t keys; // at least 1
  std::uint32_t head_dim;
  float scale;
  void* output; // [batch, head, head_dim]
  std::int64_t query_stride_batch, query_stride_head;
  std::int64_t key_stride_batch, key_stride_head;
  std::int64_t value_stride_batch, value_stride_head;
  std::int64_t output_stride_batch, output_stride_head;
  float* lse; // [batch, head]
  std::int64_t lse_stride_batch, lse_stride_head;
  const float* sinks; // [head]
  std::int64_t sinks_stride;
};

// What only the general variant looks at.
struct GeneralStepArguments : SingleStepArguments {
  AttentionProblem problem;
  bool query_vectors, key_vectors, value_vectors; // four elements can be loaded at once
};

template <class Shape>
using StepArguments = std::conditional_t<Shape::general, GeneralStepArguments, SingleStepArguments>;

template <typename Scalar>
__device__ __forceinline__ const char* row_of_grid(const void* tensor, std::int64_t stride_batch,
                                                   std::int64_t stride_head) {
  return reinterpret_cast<const char*>(static_cast<const Scalar*>(tensor) + blockIdx.z * stride_batch +
                                       blockIdx.y * stride_head);
}

// Four neighbouring elements.
template <typename Scalar>
struct alignas(4 * sizeof(Scalar)) Four {
  Scalar x[4];
};
template <typename Scalar>
__device__ __forceinline__ Four<Scalar> load_four(const char* from) {
  using Vector = std::conditional_t<sizeof(Scalar) == 4, float4, float2>;
  const Vector bits = __ldg(reinterpret_cast<const Vector*>(from));
  Four<Scalar> four;
  memcpy(&four, &bits, sizeof(four));
  return four;
}

// The same from element `dim` of a row on, of any alignment: zeros past head_dim.
template <typename Scalar>
__device__ __forceinline__ Four<Scalar> load_four(const Scalar* row, int dim, int head_dim, bool vectors) {
  if (vectors && dim < head_dim) {
    return load_four<Scalar>(reinterpret_cast<const char*>(row + dim));
  }
  Four<Scalar> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    four.x[i] = !vectors && dim + i < head_dim ? __ldg(row + dim + i) : from_float<Scalar>(0.0f);
  }
  return four;
}

// A lane's keys of a step: their elements, and what becomes of their scores.
template <class Shape>
struct StepRows {
  using Vectors = Four<typename Shape::Scalar>[Shape::rows][Shape::vectors];
  Vectors keys, values;
  bool in_range[Shape::rows]; // takes part; else none of its elements may be looked at
  // Of the general variant: what the mask adds, n - (length - 1), and whether the key's page does not exist.
  float mask[Shape::rows], distance[Shape::rows];
  bool missing[Shape::rows];

  static __device__ __forceinline__ std::uint32_t key_of(int r, unsigned source) {
    return (r * Shape::sources + source) * 4 + threadIdx.x % 32 / 8;
  }
  static __device__ __forceinline__ int dim_of(int v) { return static_cast<int>(threadIdx.x % 8) * 4 + v * 32; }

  __device__ __forceinline__ void load_general(const GeneralStepArguments& args) {
    const AttentionProblem& problem = args.problem;
    const std::uint32_t length = row_length(problem, blockIdx.z);
    const KeyRange range = attended_keys(problem, length);
    const int head_dim = static_cast<int>(args.head_dim);
    const auto load = [&](Four<typename Shape::Scalar>(&row)[Shape::vectors], const void* cache, std::int64_t offset,
                          bool exists, bool vectors) {
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        row[v] = load_four(static_cast<const typename Shape::Scalar*>(cache) + offset, dim_of(v), exists ? head_dim : 0,
                           vectors);
      }
    };
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) {
      const std::uint32_t key = range.begin + key_of(r, blockIdx.x * Shape::warps + threadIdx.x / 32);
      in_range[r] = key < range.end;
      distance[r] = static_cast<float>(static_cast<int>(key - (length - 1)));
      mask[r] = in_range[r] ? mask_value(problem, blockIdx.z, blockIdx.y, key) : 0.0f;
      in_range[r] = in_range[r] && mask[r] != negative_infinity;
      const KeySlot slot = in_range[r] ? key_slot(problem, blockIdx.z, key) : KeySlot{-1, 0};
      const bool exists = page_exists(problem, slot.page);
      missing[r] = in_range[r] && !exists;
      load(keys[r], problem.key,
           slot.page * problem.key_stride_page + blockIdx.y * problem.key_stride_head +
               slot.slot * problem.key_stride_slot,
           exists, args.key_vectors);
      load(values[r], problem.value,
           slot.page * problem.value_stride_page + blockIdx.y * problem.value_stride_head +
               slot.slot * problem.value_stride_slot,
           exists, args.value_vectors);
    }
  }

  __device__ __forceinline__ float score(const GeneralStepArguments& args, int r, float dot) const {
    const AttentionProblem& problem = args.problem;
    const float slope = alibi_slope(problem, blockIdx.z, blockIdx.y);
    const float score = modified_score({args.scale, problem.softcap, slope}, dot, distance[r], mask[r]);
    return missing[r] ? __int_as_float(0x7fffffff) : score;
  }
};

// values[source * stride] and states[source] of this lane's sources, then of all lanes that share a dim.
template <class Shape>
__device__ __forceinline__ SoftmaxState<1> fold_dim(const float* values, int stride, const float2* states) {
  constexpr unsigned all = 0xffffffffu;
  SoftmaxState<1> sources[Shape::lane_sources];
  SoftmaxState<1> total;
#pragma unroll
  for (int i = 0; i < Shape::lane_sources; ++i) {
    const float2 state = states[i];
    sources[i] = {state.x, state.y, {values[i * stride]}};
    total.max_score = fmaxf(total.max_score, state.x);
  }
#pragma unroll
  for (int offset = Shape::dims; offset < 32; offset *= 2) {
    total.max_score = fmaxf(total.max_score, __shfl_xor_sync(all, total.max_score, offset));
  }
#pragma unroll
  for (int i = 0; i < Shape::lane_sources; ++i) {
    total.merge_below(sources[i]);
  }
#pragma unroll
  for (int offset = Shape::dims; offset < 32; offset *= 2) {
    total.sum_exp += __shfl_xor_sync(all, total.sum_exp, offset);
    total.values[0] += __shfl_xor_sync(all, total.values[0], offset);
  }
  return total;
}

template <typename Scalar>
__device__ __forceinline__ void write_dim(const SingleStepArguments& args, SoftmaxState<1> state, std::uint32_t dim) {
  if (dim >= args.head_dim) {
    return;
  }
  if (args.sinks != nullptr) {
    state.merge_sink(args.sinks[blockIdx.y * args.sinks_stride]);
  }
  static_cast<Scalar*>(
      args.output)[blockIdx.z * args.output_stride_batch + blockIdx.y * args.output_stride_head + dim] =
      from_float<Scalar>(state.output(0, wide_value_scale));
  if (dim == 0 && args.lse != nullptr) {
    args.lse[blockIdx.z * args.lse_stride_batch + blockIdx.y * args.lse_stride_head] = state.log_sum_exp();
  }
}

// grid = (cluster_size, heads, batch)
template <class Shape>
__global__ void __launch_bounds__(Shape::warps * 32)
    simt_single_step(const __grid_constant__ StepArguments<Shape> args) {
  using Scalar = typename Shape::Scalar;
  constexpr unsigned all = 0xffffffffu;
  constexpr int vectors = Shape::vectors, rows = Shape::rows, warps = Shape::warps, slice = Shape::slice;
  __shared__ __align__(16) float shared_values[Shape::sources * slice]; // [source][dim of the slice]
  __shared__ __align__(16) float2 shared_states[Shape::sources];        // (max_score, sum_exp)
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  const unsigned source = blockIdx.x * warps + warp;
  StepRows<Shape> step;
  Four<Scalar> queries[vectors];
  bool dim_exists[vectors];
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    dim_exists[v] = step.dim_of(v) < static_cast<int>(args.head_dim);
  }
  const char* const query_row = row_of_grid<Scalar>(args.query, args.query_stride_batch, args.query_stride_head);
  if constexpr (Shape::general) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      queries[v] = load_four(reinterpret_cast<const Scalar*>(query_row), step.dim_of(v),
                             static_cast<int>(args.head_dim), args.query_vectors);
    }
    step.load_general(args);
  } else {
    // Rows past the end are read as the last one, dims past the end as the first ones; neither is used.
    std::uint32_t dim_bytes[vectors];
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      dim_bytes[v] = dim_exists[v] ? step.dim_of(v) * static_cast<std::uint32_t>(sizeof(Scalar)) : 0;
    }
    std::uint32_t row[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const std::uint32_t key = step.key_of(r, source);
      step.in_range[r] = key < args.keys;
      row[r] = min(key, args.keys - 1);
    }
    const char* const key_rows = row_of_grid<Scalar>(args.key, args.key_stride_batch, args.key_stride_head);
    const char* const value_rows = row_of_grid<Scalar>(args.value, args.value_stride_batch, args.value_stride_head);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        step.keys[r][v] = load_four<Scalar>(key_rows + (row[r] * args.key_row_bytes + dim_bytes[v]));
      }
    }
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      queries[v] = load_four<Scalar>(query_row + dim_bytes[v]);
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        step.values[r][v] = load_four<Scalar>(value_rows + (row[r] * args.value_row_bytes + dim_bytes[v]));
      }
    }
  }
  __syncwarp(); // keeps the loads above what follows
#if __CUDA_ARCH__ >= 900
  __shared__ std::uint64_t full; // mbarrier, counts bytes
  if constexpr (Shape::cluster_size > 1) {
    open_mailbox(&full, sizeof(shared_values) + sizeof(shared_states));
  }
#endif
  // One state for the warp.
  float scores[rows];
  float max_score = negative_infinity;
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      float more = sum;
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        more = fmaf(to_float(step.keys[r][v].x[i]), to_float(queries[v].x[i]), more);
      }
      sum = dim_exists[v] ? more : sum;
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(all, sum, offset);
    }
    float score = sum * args.scale;
    if constexpr (Shape::general) {
      score = step.score(args, r, sum);
    }
    scores[r] = step.in_range[r] ? score : negative_infinity;
    max_score = fmaxf(max_score, scores[r]);
  }
  max_score = fmaxf(max_score, __shfl_xor_sync(all, max_score, 8));
  max_score = fmaxf(max_score, __shfl_xor_sync(all, max_score, 16));
  float sum_exp = 0;
  float output[4 * vectors] = {};
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const float weight = softmax_weight(scores[r], max_score);
    sum_exp += weight;
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float more = fmaf(weight * wide_value_scale, to_float(step.values[r][v].x[i]), output[4 * v + i]);
        output[4 * v + i] = step.in_range[r] ? more : output[4 * v + i];
      }
    }
  }
  sum_exp += __shfl_xor_sync(all, sum_exp, 8);
  sum_exp += __shfl_xor_sync(all, sum_exp, 16);
  // Sum the outputs over the four groups of lanes, each of which keeps a quarter.
  const bool upper_half = (lane & 16) != 0, upper_quarter = (lane & 8) != 0;
  float halves[2 * vectors], quarter[vectors];
#pragma unroll
  for (int i = 0; i < 2 * vectors; ++i) {
    const float low = output[i], high = output[2 * vectors + i];
    halves[i] = (upper_half ? high : low) + __shfl_xor_sync(all, upper_half ? low : high, 16);
  }
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const float low = halves[i], high = halves[vectors + i];
    quarter[i] = (upper_quarter ? high : low) + __shfl_xor_sync(all, upper_quarter ? low : high, 8);
  }
  const int first = (upper_half ? 2 * vectors : 0) + (upper_quarter ? vectors : 0); // of output[]
  const int dim = first / 4 * 32 + static_cast<int>(lane % 8) * 4 + first % 4;
  if constexpr (Shape::cluster_size == 1) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      shared_values[warp * slice + dim + i] = quarter[i];
    }
    if (lane == 0) {
      shared_states[warp] = make_float2(max_score, sum_exp);
    }
    __syncthreads();
    if (warp < vectors) {
      write_dim<Scalar>(args, fold_dim<Shape>(shared_values + threadIdx.x, slice, shared_states), threadIdx.x);
    }
  } else {
#if __CUDA_ARCH__ >= 900
    namespace ptx = cuda::ptx;
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const unsigned owner = dim / slice, state_owner = lane % Shape::cluster_size;
    float* const to = cluster.map_shared_rank(shared_values + source * slice + dim % slice, owner);
    float2* const state_to = cluster.map_shared_rank(shared_states + source, state_owner);
    std::uint64_t* const owner_full = cluster.map_shared_rank(&full, owner);
    std::uint64_t* const state_owner_full = cluster.map_shared_rank(&full, state_owner);
    ptx::barrier_cluster_wait(ptx::sem_acquire); // all mailboxes are open
    if constexpr (vectors == 1) {
      ptx::st_async(to, quarter[0], owner_full);
    } else {
      ptx::st_async(to, quarter, owner_full);
    }
    if (lane < Shape::cluster_size) {
      const float state[2] = {max_score, sum_exp};
      ptx::st_async(reinterpret_cast<float*>(state_to), state, state_owner_full);
    }
    constexpr unsigned dims = Shape::dims;
    if (warp < slice / dims) {
      await_mailbox(&full);
      const unsigned own = warp * dims + lane % dims;
      const unsigned first_source = lane / dims * Shape::lane_sources;
      const SoftmaxState<1> state =
          fold_dim<Shape>(shared_values + first_source * slice + own, slice, shared_states + first_source);
      if (lane < dims) {
        write_dim<Scalar>(args, state, blockIdx.x * slice + own);
      }
    }
#endif
  }
}

} // namespace single_query
