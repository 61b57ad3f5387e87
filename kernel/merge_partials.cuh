// From the softmax states of a block's warps to the output of their row: fold the warps, fold the blocks of a cluster
// (they push their states to the block that owns a slice of the output), fold the pieces of a row that is cut over
// blocks or clusters (the last to arrive gathers them through global memory), write the result. Both kernel bodies end
// here, in one compiled copy: sizes and types are run-time values.
//
// An element is four head dims of one query head: element = head << head_shift | dim / 4. All folds run over elements,
// take their sources in a fixed order, and so give the same bits every time.
#pragma once

#include "convert.cuh"
#include "work.cuh"

#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cuda/ptx>

namespace single_query {

using ElementState = SoftmaxState<4>;

// The states of a block's warps in shared memory as the kernel bodies leave them: of each warp values[head][pitch],
// then (max_score, sum_exp)[head]. The pitch spreads the tensor cores' fragments over all banks.
struct WarpStates {
  float* base;
  int warp_stride; // floats
  int tile_heads;  // room, not all need be in use
  int head_shift;

  static __host__ __device__ constexpr int pitch(int head_shift) { return (4 << head_shift) + 4; }
  // Floats of one warp; a multiple of 4.
  static __host__ __device__ constexpr int floats(int tile_heads, int head_shift) {
    return (tile_heads * (pitch(head_shift) + 2) + 3) / 4 * 4;
  }
  __device__ float* values(int warp, int head) const { return base + warp * warp_stride + head * pitch(head_shift); }
  __device__ float2& state(int warp, int head) const {
    return reinterpret_cast<float2*>(values(warp, tile_heads))[head];
  }
  __device__ ElementState element(int warp, int element) const {
    const int head = element >> head_shift;
    const int vector = element & ((1 << head_shift) - 1);
    const float4 v = reinterpret_cast<const float4*>(values(warp, head))[vector];
    const float2 s = state(warp, head);
    return {s.x, s.y, {v.x, v.y, v.z, v.w}};
  }
};

// Where the states of a cluster's warps arrive. Block r of the cluster owns every cluster_size'th element from r on;
// the mailbox holds those of every warp, [source][slice]. One slot of padding a source keeps threads that read one
// element of several sources off each other's banks.
struct ClusterMailbox {
  float4* values;
  float2* states;
  std::uint64_t* full; // mbarrier, counts bytes
  int slice;           // elements of a block; the cluster size divides the elements of a head

  static __host__ __device__ constexpr int bytes(int elements, int cluster_size, int warps) {
    return 16 +
           cluster_size * warps * (elements / cluster_size + 1) * static_cast<int>(sizeof(float4) + sizeof(float2));
  }
  __device__ ClusterMailbox(unsigned char* memory, int elements, int cluster_size, int warps)
      : values(reinterpret_cast<float4*>(memory + 16)), full(reinterpret_cast<std::uint64_t*>(memory)),
        slice(elements >> log2_floor(cluster_size)) {
    states = reinterpret_cast<float2*>(values + cluster_size * warps * (slice + 1));
  }
};

// Merge load(begin) .. load(end - 1) in order, a chain of batch_size at a time. The loads of a batch are independent,
// so that they overlap.
template <int batch_size, class Load>
__device__ __forceinline__ ElementState fold_sources(std::uint32_t begin, std::uint32_t end, Load load) {
  ElementState total, chain;
#pragma unroll 1
  for (std::uint32_t i = begin; i < end; i += batch_size) {
    ElementState sources[batch_size];
    float max_score = chain.max_score;
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      if (i + k < end) {
        sources[k] = load(i + k);
      }
    }
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      max_score = fmaxf(max_score, sources[k].max_score);
    }
    chain.raise_max(max_score);
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      chain.merge_below(sources[k]);
    }
    if (end - begin <= batch_size) {
      return chain;
    }
    total.merge_chain(chain);
  }
  return total;
}

// The states of `lanes` neighbouring lanes become one, the same in all of them.
__device__ __forceinline__ void merge_lanes(ElementState& state, unsigned lanes) {
  constexpr unsigned all = 0xffffffffu;
  float max_score = state.max_score;
#pragma unroll 1
  for (unsigned offset = 1; offset < lanes; offset *= 2) {
    max_score = fmaxf(max_score, __shfl_xor_sync(all, max_score, offset));
  }
  state.raise_max(max_score);
#pragma unroll 1
  for (unsigned offset = 1; offset < lanes; offset *= 2) {
    state.sum_exp += __shfl_xor_sync(all, state.sum_exp, offset);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.values[i] += __shfl_xor_sync(all, state.values[i], offset);
    }
  }
}

// emit(state, i) for i in [0, count), from load(0, i) .. load(sources - 1, i). As many lanes as the block can spare
// share an element and merge their ranges of sources at the end. The block size is a power of two.
template <int batch_size, class Load, class Emit>
__device__ __forceinline__ void fold_elements(int count, std::uint32_t sources, Load load, Emit emit) {
  const int spare_shift = log2_floor(blockDim.x) - log2_floor(2 * count - 1); // log2 of count rounded up
  const int shift = min(min(max(spare_shift, 0), 5), log2_floor(sources));
  const std::uint32_t share = (sources + (1u << shift) - 1) >> shift;
  const std::uint32_t lane = threadIdx.x & ((1u << shift) - 1);
  const std::uint32_t begin = min(sources, lane * share);
  const std::uint32_t end = min(sources, begin + share);
  const int step = static_cast<int>(blockDim.x >> shift);
#pragma unroll 1
  for (int base = 0; base < count; base += step) {
    const int element = base + static_cast<int>(threadIdx.x >> shift);
    ElementState state;
    if (element < count) {
      state = fold_sources<batch_size>(begin, end, [&](std::uint32_t source) { return load(source, element); });
    }
    if (shift > 0) {
      merge_lanes(state, 1u << shift);
    }
    if (lane == 0 && element < count) {
      emit(state, element);
    }
  }
}

// What one block has to finish.
struct Finish {
  Piece piece;
  Heads heads;
  Cut cut; // if the piece is not whole
  WarpStates warps;
  unsigned char* mailbox; // by_row, of clusters
};

// Output and log-sum-exp of one element; the sink joins here, once a row.
__device__ __forceinline__ void write_output(const KernelArguments& args, const Finish& finish, ElementState state,
                                             int element) {
  const AttentionProblem& problem = args.problem;
  const int dim = (element & ((1 << args.head_shift) - 1)) * 4;
  const int left = static_cast<int>(problem.head_dim) - dim;
  if (left <= 0) {
    return;
  }
  const std::int64_t query_head = finish.heads.first_query_head + (element >> args.head_shift);
  if (problem.sinks != nullptr) {
    state.merge_sink(problem.sinks[query_head * problem.sinks_stride]);
  }
  const float scale = value_scale(problem.dtype == DataType::float16);
  float output[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    output[i] = state.output(i, scale);
  }
  const std::int64_t at =
      finish.piece.batch * problem.output_stride_batch + query_head * problem.output_stride_head + dim;
  switch (problem.dtype) {
  case DataType::float16:
    store_four(static_cast<__half*>(problem.output) + at, output, left, args.output_vectors);
    break;
  case DataType::bfloat16:
    store_four(static_cast<__nv_bfloat16*>(problem.output) + at, output, left, args.output_vectors);
    break;
  default:
    store_four(static_cast<float*>(problem.output) + at, output, left, args.output_vectors);
  }
  if (dim == 0 && problem.lse != nullptr) {
    problem.lse[finish.piece.batch * problem.lse_stride_batch + query_head * problem.lse_stride_head] =
        state.log_sum_exp();
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
      if (last != 0) {
        counter.store(0, cuda::memory_order_relaxed);
      }
    } else {
      last = cut.index == cut.count - 1;
    }
  }
  __syncthreads();
  return last != 0;
}

#if __CUDA_ARCH__ >= 900
// Makes a mailbox ready for the bytes that the cluster's blocks will push, and tells them so. `full` is its mbarrier.
__device__ __forceinline__ void open_mailbox(std::uint64_t* full, unsigned bytes) {
  namespace ptx = cuda::ptx;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full, bytes);
  }
  __syncwarp();
  ptx::barrier_cluster_arrive(ptx::sem_relaxed); // the fence has published the mbarrier
}

__device__ __forceinline__ void open_mailbox(const ClusterMailbox& mailbox, int cluster_size) {
  open_mailbox(mailbox.full, mailbox.slice * cluster_size * (blockDim.x / 32) * (sizeof(float4) + sizeof(float2)));
}

// Every warp pushes its state, element by element, to the blocks of the cluster that own them. A lane always pushes to
// the same block, since the cluster size divides 32.
__device__ __forceinline__ void push_states(const ClusterMailbox& mailbox, const WarpStates& warps, int elements,
                                            int cluster_size) {
  namespace ptx = cuda::ptx;
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const int shift = log2_floor(cluster_size);
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int owner = lane & (cluster_size - 1);
  const int at = (rank * static_cast<int>(blockDim.x / 32) + warp) * (mailbox.slice + 1) + (lane >> shift);
  float4* values = cluster.map_shared_rank(mailbox.values + at, owner);
  float2* states = cluster.map_shared_rank(mailbox.states + at, owner);
  std::uint64_t* const full = cluster.map_shared_rank(mailbox.full, owner);
  ptx::barrier_cluster_wait(ptx::sem_acquire); // all mailboxes are open
#pragma unroll 1
  for (int element = lane; element < elements; element += 32) {
    const ElementState state = warps.element(warp, element);
    const float scalars[2] = {state.max_score, state.sum_exp};
    ptx::st_async(reinterpret_cast<float*>(values), state.values, full);
    ptx::st_async(reinterpret_cast<float*>(states), scalars, full);
    values += 32 >> shift;
    states += 32 >> shift;
  }
}
#endif

// The end of a piece. All threads of the block call it, when each warp has left its state in finish.warps.
__device__ __forceinline__ void finish_piece(const KernelArguments& args, const Finish& finish) {
  const int cluster_size = args.plan.cluster_size;
  const int warps = static_cast<int>(blockDim.x / 32);
  const int elements = finish.heads.count << args.head_shift;
  const ClusterMailbox mailbox(finish.mailbox, elements, cluster_size, warps);
  const int shift = log2_floor(cluster_size);
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  if (cluster_size > 1) {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    push_states(mailbox, finish.warps, elements, cluster_size);
    while (!cuda::ptx::mbarrier_try_wait_parity(mailbox.full, 0)) {
    }
#endif
  } else {
    __syncthreads();
  }
  const std::uint64_t slot_elements = static_cast<std::uint64_t>(args.tile_heads) << args.head_shift;
  // First the block's or cluster's own states; then, if this piece is the last of a row to come in, those of all
  // pieces.
  bool gather = false;
  for (;;) {
    const std::uint32_t sources = gather ? finish.cut.count : static_cast<std::uint32_t>(cluster_size * warps);
    fold_elements<4>(
        mailbox.slice, sources,
        [&](std::uint32_t source, int i) -> ElementState {
          if (!gather && cluster_size == 1) {
            return finish.warps.element(static_cast<int>(source), i);
          }
          float4 v;
          float2 s;
          if (gather) {
            const std::uint64_t at = slot_of(finish.cut, source) * slot_elements + (i << shift) + rank;
            v = __ldcg(args.partial_values + at);
            s = __ldcg(args.partial_states + at);
          } else {
            const int at = static_cast<int>(source) * (mailbox.slice + 1) + i;
            v = mailbox.values[at];
            s = mailbox.states[at];
          }
          return {s.x, s.y, {v.x, v.y, v.z, v.w}};
        },
        [&](const ElementState& state, int i) {
          const int element = (i << shift) + rank;
          if (gather || finish.piece.whole) {
            write_output(args, finish, state, element);
          } else {
            const std::uint64_t at = slot_of(finish.cut, finish.cut.index) * slot_elements + element;
            __stcg(args.partial_values + at,
                   make_float4(state.values[0], state.values[1], state.values[2], state.values[3]));
            __stcg(args.partial_states + at, make_float2(state.max_score, state.sum_exp));
          }
        });
    if (gather || finish.piece.whole || !is_last_piece(args, finish.cut)) {
      return;
    }
    gather = true;
  }
}

} // namespace single_query
