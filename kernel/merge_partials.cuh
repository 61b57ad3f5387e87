// From the softmax states of a block's warps to the output of their row, in up to three folds: of the block's warps; of
// the blocks of a cluster, which push their states to the block that owns a slice of the output; of the pieces of a row
// that is cut over blocks or clusters, which the last to arrive gathers through global memory. Then write the result.
// Both kernel bodies end here: sizes are run-time values.
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

// The states of one element in shared memory, of several sources at equal distances.
struct ElementSources {
  const float4* values;
  int values_stride;
  const float2* states;
  int states_stride;

  __device__ __forceinline__ ElementState operator()(std::uint32_t source) const {
    const float4 v = values[static_cast<int>(source) * values_stride];
    const float2 s = states[static_cast<int>(source) * states_stride];
    return {s.x, s.y, {v.x, v.y, v.z, v.w}};
  }
};

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
  // element: of all heads of the row. Its sources are this block's warps, or teams.
  __device__ ElementSources sources(int element) const {
    const int row_head = element >> head_shift;
    const int warp = team_shift == 0 ? 0 : row_head / tile_heads;
    const int head = team_shift == 0 ? row_head : row_head % tile_heads;
    const int vector = element & ((1 << head_shift) - 1);
    return {reinterpret_cast<const float4*>(values(warp, head)) + vector, warp_stride / 4 << team_shift,
            &state(warp, head), warp_stride / 2 << team_shift};
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
  // i: of the slice. Its sources are the cluster's blocks.
  __device__ ElementSources sources(int i) const { return {values + i, slice + 1, states + i, slice + 1}; }
};

// Merge load(begin) .. load(end - 1) in order. The loads of a batch are independent, so that they overlap. More than a
// chain of sources are added a batch at a time, see add_chain(). fast: weights need no more precision than 16-bit
// results show.
template <int batch_size, bool fast, class Load>
__device__ __forceinline__ ElementState fold_sources(std::uint32_t begin, std::uint32_t end, const Load& load) {
  const bool chains = end - begin > chain_length;
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
      max_score = fmaxf(max_score, sources[k].max_score);
    }
    if (i != begin) {
      chain.raise_max(max_score);
    }
    chain.max_score = max_score;
#pragma unroll
    for (int k = 0; k < batch_size; ++k) {
      const float distance = sources[k].max_score - (max_score == negative_infinity ? 0.0f : max_score);
      chain.add(sources[k], fast ? fast_exp(distance) : expf(distance));
    }
    if (chains) {
      total.merge_chain(chain);
    }
  }
  return chains ? total : chain;
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

// What one block has to finish.
struct Finish {
  Piece piece;
  Heads heads;
  Cut cut; // if the piece is not whole
  WarpStates warps;
  unsigned char* mailbox; // by_row, of clusters
};

// Output and log-sum-exp of one element; the sink joins here, once a row.
template <bool float32>
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
  const float scale = float32 ? wide_value_scale : value_scale(problem.dtype == DataType::float16);
  float output[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    output[i] = state.output(i, scale);
  }
  const std::int64_t at =
      finish.piece.batch * problem.output_stride_batch + query_head * problem.output_stride_head + dim;
  if constexpr (float32) {
    store_four(static_cast<float*>(problem.output) + at, output, left, args.output_vectors);
  } else if (problem.dtype == DataType::float16) {
    store_four(static_cast<__half*>(problem.output) + at, output, left, args.output_vectors);
  } else {
    store_four(static_cast<__nv_bfloat16*>(problem.output) + at, output, left, args.output_vectors);
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

// Returns when everything that was pushed to this block is there.
__device__ __forceinline__ void await_mailbox(std::uint64_t* full) {
  while (!cuda::ptx::mbarrier_try_wait_parity(cuda::ptx::sem_acquire, cuda::ptx::scope_cluster, full, 0)) {
  }
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

// Where the partial state of an element of a piece lies in the workspace.
__device__ __forceinline__ std::uint64_t partial_at(const KernelArguments& args, const Cut& cut, std::uint32_t piece,
                                                    int element) {
  const std::uint64_t slot_elements = static_cast<std::uint64_t>(args.row_heads) << args.head_shift;
  return slot_of(cut, piece) * slot_elements + element;
}

// The pieces of a row from global memory, by the block that came last, or each block of such a cluster for the elements
// that it owns. As many lanes as the block can spare share an element and merge their ranges of pieces at the end. In
// line: a call here would cost the steps before it a fifth more instructions.
template <bool float32>
__device__ __forceinline__ void gather_pieces(const KernelArguments& args, const Finish& finish, int count) {
  const int cluster_shift = log2_floor(args.plan.cluster_size);
  const int rank = static_cast<int>(blockIdx.x) & (args.plan.cluster_size - 1);
  const std::uint32_t pieces = finish.cut.count;
  const int spare_shift = log2_floor(blockDim.x) - log2_floor(2 * count - 1); // log2 of count rounded up
  const int shift = min(min(max(spare_shift, 0), 5), log2_floor(pieces));
  const std::uint32_t share = (pieces + (1u << shift) - 1) >> shift;
  const std::uint32_t lane = threadIdx.x & ((1u << shift) - 1);
  const std::uint32_t begin = min(pieces, lane * share);
  const std::uint32_t end = min(pieces, begin + share);
  const int step = static_cast<int>(blockDim.x >> shift);
#pragma unroll 1
  for (int base = 0; base < count; base += step) {
    const int i = base + static_cast<int>(threadIdx.x >> shift);
    const int element = (i << cluster_shift) + rank;
    ElementState state;
    if (i < count) {
      state = fold_sources<8, !float32>(begin, end, [&](std::uint32_t piece) -> ElementState {
        const std::uint64_t at = partial_at(args, finish.cut, piece, element);
        const float4 v = __ldcg(args.partial_values + at);
        const float2 s = __ldcg(args.partial_states + at);
        return {s.x, s.y, {v.x, v.y, v.z, v.w}};
      });
    }
    if (shift > 0) {
      merge_lanes(state, 1u << shift);
    }
    if (lane == 0 && i < count) {
      write_output<float32>(args, finish, state, element);
    }
  }
}

// The end of a piece. All threads of the block call it, when each warp has left its state in finish.warps.
template <bool float32>
__device__ __forceinline__ void finish_piece(const KernelArguments& args, const Finish& finish) {
  const int cluster_size = args.plan.cluster_size;
  const int shift = log2_floor(cluster_size);
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  const int elements = finish.heads.count << args.head_shift;
  const ClusterMailbox mailbox(finish.mailbox, elements, cluster_size);
  __syncthreads(); // every warp has left its state
#if __CUDA_ARCH__ >= 900
  if (cluster_size > 1) {
    cuda::ptx::barrier_cluster_wait(cuda::ptx::sem_acquire); // all mailboxes are open
  }
#endif
  // The warps of the block; then, of a cluster, the blocks.
  int count = elements;
  std::uint32_t sources = blockDim.x / 32 >> finish.warps.team_shift;
#pragma unroll 1
  for (bool of_warps = true;; of_warps = false) {
    const bool push = of_warps && cluster_size > 1;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const ElementSources from = of_warps ? finish.warps.sources(i) : mailbox.sources(i);
      const ElementState state = sources == 1 ? from(0) : fold_sources<4, !float32>(0, sources, from);
      if (push) {
        push_element(mailbox, state, i, cluster_size);
        continue;
      }
      const int element = (i << shift) + rank;
      if (finish.piece.whole) {
        write_output<float32>(args, finish, state, element);
      } else {
        const std::uint64_t at = partial_at(args, finish.cut, finish.cut.index, element);
        __stcg(args.partial_values + at,
               make_float4(state.values[0], state.values[1], state.values[2], state.values[3]));
        __stcg(args.partial_states + at, make_float2(state.max_score, state.sum_exp));
      }
    }
    if (!push) {
      break;
    }
#if __CUDA_ARCH__ >= 900
    await_mailbox(mailbox.full);
#endif
    count = mailbox.slice;
    sources = cluster_size;
  }
  if (!finish.piece.whole && is_last_piece(args, finish.cut)) {
    gather_pieces<float32>(args, finish, mailbox.slice);
  }
}

} // namespace single_query
