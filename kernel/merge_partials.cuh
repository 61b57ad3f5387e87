// From the softmax states of a block's warps to the output of their row: fold the warps, fold the blocks of a cluster
// (they push their states to the block that owns a slice of the output), fold the pieces of a row that is cut over
// blocks or clusters (the last to arrive gathers them through global memory), write the result. Both kernel bodies end
// here.
//
// An element is four head dims of one query head: element = head * (padded_dim / 4) + dim / 4. All folds run over
// elements, take their sources in a fixed order, and so give the same bits every time.
#pragma once

#include "convert.cuh"
#include "work.cuh"

#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cuda/ptx>

namespace single_query {

using ElementState = SoftmaxState<4>;

// One warp's states in shared memory as the kernel bodies leave them: values[head][staging_pitch], then
// (max_score, sum_exp)[head]. The pitch spreads the tensor cores' fragments over all banks.
template <int padded_dim>
struct WarpStaging {
  static constexpr int pitch = padded_dim + 4;
  static __host__ __device__ constexpr int floats(int heads) { return (heads * (pitch + 2) + 3) / 4 * 4; }
  float* base;
  int heads;
  __device__ float& value(int head, int dim) const { return base[head * pitch + dim]; }
  __device__ float2& state(int head) const { return reinterpret_cast<float2*>(base + heads * pitch)[head]; }
  __device__ ElementState element(int element) const {
    const int head = element / (padded_dim / 4);
    const float4 v = *reinterpret_cast<const float4*>(&value(head, element % (padded_dim / 4) * 4));
    const float2 s = state(head);
    return {s.x, s.y, {v.x, v.y, v.z, v.w}};
  }
};

// Where the states of a cluster's warps arrive: a slice of the elements of each, [source][slice]. One slot of padding
// a source keeps threads that read one element of several sources off each other's banks.
struct ClusterMailbox {
  float4* values;
  float2* states;
  std::uint64_t* full; // mbarrier, counts bytes
  static __host__ __device__ constexpr int slice(int elements, int cluster_size) {
    return (elements + cluster_size - 1) / cluster_size;
  }
  static __host__ __device__ constexpr int bytes(int elements, int cluster_size, int warps) {
    return 16 + cluster_size * warps * (slice(elements, cluster_size) + 1) * static_cast<int>(sizeof(float4) + sizeof(float2));
  }
  __device__ ClusterMailbox(unsigned char* memory, int elements, int cluster_size, int warps)
      : values(reinterpret_cast<float4*>(memory + 16)),
        states(reinterpret_cast<float2*>(values + cluster_size * warps * (slice(elements, cluster_size) + 1))),
        full(reinterpret_cast<std::uint64_t*>(memory)) {}
};

__device__ __forceinline__ ElementState shuffle_xor(const ElementState& state, int offset) {
  ElementState other;
  other.max_score = __shfl_xor_sync(0xffffffffu, state.max_score, offset);
  other.sum_exp = __shfl_xor_sync(0xffffffffu, state.sum_exp, offset);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    other.values[i] = __shfl_xor_sync(0xffffffffu, state.values[i], offset);
  }
  return other;
}

// Merge load(begin) .. load(end - 1) in order. The loads of a batch are independent, so that they overlap.
template <int batch_size, class Load>
__device__ __forceinline__ ElementState fold_sources(std::uint32_t begin, std::uint32_t end, Load load) {
  ElementState total;
#pragma unroll 1
  for (std::uint32_t i = begin; i < end; i += batch_size) {
    ElementState sources[batch_size];
    float max_score = total.max_score;
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      if (i + k < end) {
        sources[k] = load(i + k);
      }
      max_score = fmaxf(max_score, sources[k].max_score);
    }
    total.raise_max(max_score);
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      total.merge(sources[k]);
    }
  }
  return total;
}

// emit(state, element) for every element in [first, first + count), from `sources` states each. As many lanes as the
// block can spare share an element and merge their ranges of sources at the end.
template <int batch_size, class Load, class Emit>
__device__ __forceinline__ void fold_elements(int first, int count, std::uint32_t sources, Load load, Emit emit) {
  const std::uint32_t spare = blockDim.x / (count > 0 ? count : 1);
  const std::uint32_t lanes = min(32u, power_of_two_at_most(max(1u, min(spare, sources))));
  const std::uint32_t share = (sources + lanes - 1) / lanes;
  const std::uint32_t lane = threadIdx.x % lanes;
  const int step = static_cast<int>(blockDim.x / lanes);
  for (int base = 0; base < count; base += step) {
    const int element = base + static_cast<int>(threadIdx.x / lanes);
    ElementState state;
    if (element < count) {
      const std::uint32_t begin = min(sources, lane * share);
      state = fold_sources<batch_size>(begin, min(sources, begin + share),
                                       [&](std::uint32_t source) { return load(source, first + element); });
    }
    for (std::uint32_t offset = 1; offset < lanes; offset *= 2) {
      const ElementState other = shuffle_xor(state, offset);
      // The lower lane's sources come first.
      ElementState low = lane & offset ? other : state;
      low.merge(lane & offset ? state : other);
      state = low;
    }
    if (lane == 0 && element < count) {
      emit(state, first + element);
    }
  }
}

// Output and log-sum-exp of one element; the sink joins here, once a row.
template <typename Scalar, int padded_dim>
__device__ __forceinline__ void write_output(const KernelArguments& args, const Piece& piece, const Heads& heads,
                                             ElementState state, int element) {
  const AttentionProblem& problem = args.problem;
  const int dim = element % (padded_dim / 4) * 4;
  const std::int64_t query_head = heads.first_query_head + element / (padded_dim / 4);
  if (dim >= problem.head_dim) {
    return;
  }
  if (problem.sinks != nullptr) {
    state.merge_sink(problem.sinks[query_head * problem.sinks_stride]);
  }
  float output[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    output[i] = state.output(i, value_scale<Scalar>());
  }
  Scalar* destination = static_cast<Scalar*>(problem.output) + piece.batch * problem.output_stride_batch +
                        query_head * problem.output_stride_head + dim;
  store_four(destination, output, static_cast<int>(problem.head_dim) - dim, args.output_vectors);
  if (dim == 0 && problem.lse != nullptr) {
    problem.lse[piece.batch * problem.lse_stride_batch + query_head * problem.lse_stride_head] = state.log_sum_exp();
  }
}

// True in every thread of the block when all pieces of the row have been written, this block's among them. The counter
// goes back to zero for the next launch.
__device__ __forceinline__ bool is_last_piece(const KernelArguments& args, const Cut& cut) {
  __shared__ unsigned last;
  __syncthreads(); // the block's partial states are written
  if (threadIdx.x == 0) {
    if (cut.shared) {
      cuda::atomic_ref<unsigned, cuda::thread_scope_device> counter(args.counters[cut.counter]);
      last = counter.fetch_add(1, cuda::memory_order_acq_rel) == cut.count - 1;
      if (last) {
        counter.store(0, cuda::memory_order_relaxed);
      }
    } else {
      last = cut.index == cut.count - 1;
    }
  }
  __syncthreads();
  return last != 0;
}

// The end of a piece: its elements [first, first + count) are folded from `sources` states by load(source, element).
template <typename Scalar, int padded_dim, class Load>
__device__ __forceinline__ void finish_piece(const KernelArguments& args, const Piece& piece, const Cut& cut,
                                             const Heads& heads, int first, int count, std::uint32_t sources,
                                             Load load) {
  if (piece.whole) {
    fold_elements<4>(first, count, sources, load, [&](const ElementState& state, int element) {
      write_output<Scalar, padded_dim>(args, piece, heads, state, element);
    });
    return;
  }
  const std::uint64_t slot_elements = static_cast<std::uint64_t>(args.tile_heads) * (padded_dim / 4);
  const std::uint64_t own = slot_of(cut, cut.index) * slot_elements;
  fold_elements<4>(first, count, sources, load, [&](const ElementState& state, int element) {
    __stcg(args.partial_values + own + element,
           make_float4(state.values[0], state.values[1], state.values[2], state.values[3]));
    __stcg(args.partial_states + own + element, make_float2(state.max_score, state.sum_exp));
  });
  if (!is_last_piece(args, cut)) {
    return;
  }
  fold_elements<8>(
      first, count, cut.count,
      [&](std::uint32_t index, int element) -> ElementState {
        const std::uint64_t at = slot_of(cut, index) * slot_elements + element;
        const float4 v = __ldcg(args.partial_values + at);
        const float2 s = __ldcg(args.partial_states + at);
        return {s.x, s.y, {v.x, v.y, v.z, v.w}};
      },
      [&](const ElementState& state, int element) {
        write_output<Scalar, padded_dim>(args, piece, heads, state, element);
      });
}

// A block on its own: fold its warps. staging(warp) is that warp's WarpStaging.
template <typename Scalar, int padded_dim, class Staging>
__device__ __forceinline__ void merge_block(const KernelArguments& args, const Piece& piece, const Cut& cut,
                                            const Heads& heads, Staging staging) {
  __syncthreads(); // all warps have left their states
  finish_piece<Scalar, padded_dim>(
      args, piece, cut, heads, 0, heads.count * (padded_dim / 4), blockDim.x / 32,
      [&](std::uint32_t warp, int element) { return staging(warp).element(element); });
}

#if __CUDA_ARCH__ >= 900
namespace ptx = cuda::ptx;

// Before the first barrier_cluster_arrive: how many bytes the other blocks will push here.
__device__ __forceinline__ void open_mailbox(const ClusterMailbox& mailbox, int elements, int cluster_size, int rank) {
  const int slice = ClusterMailbox::slice(elements, cluster_size);
  const int owned = min(slice, elements - rank * slice);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(mailbox.full, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    if (owned > 0) {
      const unsigned bytes = owned * cluster_size * (blockDim.x / 32) * (sizeof(float4) + sizeof(float2));
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, mailbox.full, bytes);
    }
  }
  __syncwarp();
  ptx::barrier_cluster_arrive(ptx::sem_release);
}

// The blocks of a cluster: every warp pushes its state, slice by slice, to the blocks that own the slices.
template <typename Scalar, int padded_dim>
__device__ __forceinline__ void merge_cluster(const KernelArguments& args, const Piece& piece, const Cut& cut,
                                              const Heads& heads, const WarpStaging<padded_dim>& staging,
                                              const ClusterMailbox& mailbox, int cluster_size, int rank) {
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const int elements = heads.count * (padded_dim / 4);
  const int slice = ClusterMailbox::slice(elements, cluster_size);
  const int source = rank * (blockDim.x / 32) + threadIdx.x / 32;
  __syncwarp();
  ptx::barrier_cluster_wait(ptx::sem_acquire); // all mailboxes are open
  for (int element = threadIdx.x % 32; element < elements; element += 32) {
    const int owner = element / slice;
    const int at = source * (slice + 1) + element - owner * slice;
    const ElementState state = staging.element(element);
    std::uint64_t* full = cluster.map_shared_rank(mailbox.full, owner);
    const float values[4] = {state.values[0], state.values[1], state.values[2], state.values[3]};
    const float scalars[2] = {state.max_score, state.sum_exp};
    ptx::st_async(reinterpret_cast<float*>(cluster.map_shared_rank(mailbox.values + at, owner)), values, full);
    ptx::st_async(reinterpret_cast<float*>(cluster.map_shared_rank(mailbox.states + at, owner)), scalars, full);
  }
  const int first = rank * slice;
  const int owned = min(slice, elements - first);
  if (owned <= 0) {
    return;
  }
  while (!ptx::mbarrier_try_wait_parity(mailbox.full, 0)) {
  }
  finish_piece<Scalar, padded_dim>(args, piece, cut, heads, first, owned, cluster_size * (blockDim.x / 32),
                                   [&](std::uint32_t from, int element) -> ElementState {
                                     const int at = static_cast<int>(from) * (slice + 1) + element - first;
                                     const float4 v = mailbox.values[at];
                                     const float2 s = mailbox.states[at];
                                     return {s.x, s.y, {v.x, v.y, v.z, v.w}};
                                   });
}
#endif

} // namespace single_query
