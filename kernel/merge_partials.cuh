// From the softmax states of a block's warps to the output of their row, in up to three folds: of the block's warps; of
// the blocks of a cluster, which push their states to the block that owns a slice of the output; of the pieces of a row
// that is cut over blocks or clusters, which the last to arrive gathers through global memory. Then write the result.
// Both kernel bodies end here, in one compiled copy: sizes and types are run-time values.
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
  int tile_heads;  // of a warp: room, not all need be in use; a power of two
  int head_shift;
  int team_shift; // log2 of the warps that hold one tile each of the row's heads: together they are one source

  static __host__ __device__ constexpr int pitch(int head_shift) { return (4 << head_shift) + 4; }
  // Floats of one warp; a multiple of 4.
  static __host__ __device__ constexpr int floats(int tile_heads, int head_shift) {
    return (tile_heads * (pitch(head_shift) + 2) + 3) / 4 * 4;
  }
  __device__ float* values(int warp, int head) const { return base + warp * warp_stride + head * pitch(head_shift); }
  __device__ float2& state(int warp, int head) const {
    return reinterpret_cast<float2*>(values(warp, tile_heads))[head];
  }
  // element: of all heads of the row.
  __device__ ElementState element(int source, int element) const {
    const int row_head = element >> head_shift;
    const int warp = team_shift == 0 ? source : (source << team_shift) + row_head / tile_heads;
    const int head = team_shift == 0 ? row_head : row_head % tile_heads;
    const int vector = element & ((1 << head_shift) - 1);
    const float4 v = reinterpret_cast<const float4*>(values(warp, head))[vector];
    const float2 s = state(warp, head);
    return {s.x, s.y, {v.x, v.y, v.z, v.w}};
  }
};

// Where the states of a cluster's blocks arrive. Block r of the cluster owns every cluster_size'th element from r on;
// its mailbox holds those of every block, [block][slice]. One slot of padding a block keeps threads that read one
// element of several blocks off each other's banks.
struct ClusterMailbox {
  float4* values;
  float2* states;
  std::uint64_t* full; // mbarrier, counts bytes
  int slice;           // elements of a block; the cluster size divides the elements of a head

  static __host__ __device__ constexpr int bytes(int elements, int cluster_size) {
    return 16 + cluster_size * (elements / cluster_size + 1) * static_cast<int>(sizeof(float4) + sizeof(float2));
  }
  __device__ ClusterMailbox(unsigned char* memory, int elements, int cluster_size)
      : values(reinterpret_cast<float4*>(memory + 16)), full(reinterpret_cast<std::uint64_t*>(memory)),
        slice(elements >> log2_floor(cluster_size)) {
    states = reinterpret_cast<float2*>(values + cluster_size * (slice + 1));
  }
};

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
    }
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      max_score = fmaxf(max_score, sources[k].max_score);
    }
    total.raise_max(max_score);
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      total.merge_below(sources[k]);
    }
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
  open_mailbox(mailbox.full, mailbox.slice * cluster_size * (sizeof(float4) + sizeof(float2)));
}
#endif

// Send one element of this block's state to the block of the cluster that owns it.
__device__ __forceinline__ void push_element(const ClusterMailbox& mailbox, const ElementState& state, int element,
                                             int cluster_size) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = cuda::ptx;
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const unsigned rank = blockIdx.x & (cluster_size - 1);
  const unsigned owner = element & (cluster_size - 1);
  const int at = static_cast<int>(rank) * (mailbox.slice + 1) + (element >> log2_floor(cluster_size));
  std::uint64_t* const full = cluster.map_shared_rank(mailbox.full, owner);
  const float scalars[2] = {state.max_score, state.sum_exp};
  ptx::st_async(reinterpret_cast<float*>(cluster.map_shared_rank(mailbox.values + at, owner)), state.values, full);
  ptx::st_async(reinterpret_cast<float*>(cluster.map_shared_rank(mailbox.states + at, owner)), scalars, full);
#endif
}

// The end of a piece. All threads of the block call it, when each warp has left its state in finish.warps.
__device__ __forceinline__ void finish_piece(const KernelArguments& args, const Finish& finish) {
  enum class From { warps, mailbox, workspace };
  const int cluster_size = args.plan.cluster_size;
  const int shift = log2_floor(cluster_size);
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  const int elements = finish.heads.count << args.head_shift;
  const ClusterMailbox mailbox(finish.mailbox, elements, cluster_size);
  const std::uint64_t slot_elements = static_cast<std::uint64_t>(args.row_heads) << args.head_shift;
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (cluster_size > 1) {
    cuda::ptx::barrier_cluster_wait(cuda::ptx::sem_acquire); // all mailboxes are open
  }
#endif
  int count = elements;
  std::uint32_t sources = blockDim.x / 32 >> finish.warps.team_shift;
#pragma unroll 1
  for (From from = From::warps;;) {
    const bool push = from == From::warps && cluster_size > 1;
    const bool last = !push && (finish.piece.whole || from == From::workspace);
    fold_elements<4>(
        count, sources,
        [&](std::uint32_t source, int i) -> ElementState {
          if (from == From::warps) {
            return finish.warps.element(static_cast<int>(source), i);
          }
          float4 v;
          float2 s;
          if (from == From::workspace) {
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
          if (push) {
            push_element(mailbox, state, i, cluster_size);
          } else if (last) {
            write_output(args, finish, state, element);
          } else {
            const std::uint64_t at = slot_of(finish.cut, finish.cut.index) * slot_elements + element;
            __stcg(args.partial_values + at,
                   make_float4(state.values[0], state.values[1], state.values[2], state.values[3]));
            __stcg(args.partial_states + at, make_float2(state.max_score, state.sum_exp));
          }
        });
    if (push) {
#if __CUDA_ARCH__ >= 900
      while (!cuda::ptx::mbarrier_try_wait_parity(mailbox.full, 0)) {
      }
#endif
      from = From::mailbox;
      sources = cluster_size;
    } else if (last || !is_last_piece(args, finish.cut)) {
      return;
    } else {
      from = From::workspace;
      sources = finish.cut.count;
    }
    count = mailbox.slice;
  }
}

} // namespace single_query
