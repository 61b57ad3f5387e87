// What a thread block works on: the kernel's arguments, pieces of rows, and the walk over a block's share of them.
#pragma once

#include "split_plan.h"

#include <cuda/std/cstdint>

namespace single_query {

// What a compiled instance of a kernel body is for. A short problem takes about as long as its instructions take to
// arrive, so the common cases get instances with little code.
enum class Path {
  plain,      // by row, a contiguous cache, 16-byte copies, no lengths, no modifiers
  row,        // the same with lengths
  walk,       // the same in a walk
  pages,      // by row, pages of multiples of 16 keys, 16-byte copies, no modifiers
  pages_walk, // the same in a walk
  any_pages,  // pages of any size, 16-byte copies, no modifiers
  spread,     // 16-bit rows of any alignment in a contiguous cache, no modifiers: see cache_ring.cuh
  general     // everything
};
constexpr int paths = 8;

template <Path path>
constexpr bool may_walk = path != Path::plain && path != Path::row && path != Path::pages;

template <Path path>
constexpr bool has_whole_pages = path == Path::pages || path == Path::pages_walk; // of multiples of 16 keys
template <Path path>
constexpr bool has_pages = has_whole_pages<path> || path == Path::any_pages;
template <Path path>
constexpr bool may_have_pages = has_pages<path> || path == Path::general;

// Counters at the start of every workspace, zero between calls; partial states follow them.
constexpr std::uint32_t workspace_counters = 4096;

// The keys of a batch entry's rows, and how many units they make.
struct RowUnits {
  std::uint32_t length;
  KeyRange keys;
  std::uint32_t units;
};

struct KernelArguments {
  AttentionProblem problem;
  SplitPlan plan;
  int group;     // query heads per key/value head
  int row_heads; // query heads of a full row: a tile's, or those of a team's tiles
  int rows_per_kv_head;
  std::uint32_t rows_per_batch;      // kv_heads * rows_per_kv_head
  int head_shift;                    // log2 of the elements of a head, see merge_partials.cuh
  RowUnits uniform;                  // of every row, where there are no lengths
  ClusterShares uniform_shares;      // the same, by row
  std::int64_t key_step, value_step; // elements from one step of a warp to its next, in a contiguous cache
  // Bytes that every row begins and ends at multiples of: 16, 8, 4 or (elements of 16 bits) 2.
  int query_copy_bytes, key_copy_bytes, value_copy_bytes;
  // The rows at the highest addresses: the caller's memory may end where they do.
  const void* last_key_row;
  const void* last_value_row;
  bool modified;       // softcap, ALiBi or a mask: scores are more than scaled dot products
  bool output_vectors; // output elements can be stored four at a time
  // Workspace. Partial states: [slot][element] with an element of four head dims, see merge_partials.cuh.
  std::uint32_t* counters;
  float4* partial_values;
  float2* partial_states;
};

template <Path path>
__device__ __forceinline__ bool walks(const KernelArguments& args) {
  return path == Path::walk || path == Path::pages_walk || (may_walk<path> && args.plan.walk);
}

// One of the two caches, as a kernel body reads it. Strides in elements.
struct Cache {
  const void* data;
  std::int64_t stride_page, stride_head, stride_slot;
  int copy_bytes;
  const void* last_row;
};

__device__ __forceinline__ Cache keys_of(const KernelArguments& args) {
  const AttentionProblem& problem = args.problem;
  return {problem.key,         problem.key_stride_page, problem.key_stride_head, problem.key_stride_slot,
          args.key_copy_bytes, args.last_key_row};
}

__device__ __forceinline__ Cache values_of(const KernelArguments& args) {
  const AttentionProblem& problem = args.problem;
  return {problem.value,         problem.value_stride_page, problem.value_stride_head, problem.value_stride_slot,
          args.value_copy_bytes, args.last_value_row};
}

// Every launch finds its arguments uncached: a first read of each 64 bytes of them takes some 300 cycles. This reads
// them all at once, at the start of a kernel. The word it returns is for await_arguments().
__device__ __forceinline__ std::uint32_t fetch_arguments(const KernelArguments& args) {
  constexpr unsigned lines = (sizeof(KernelArguments) + 63) / 64;
  const unsigned line = threadIdx.x % 32 < lines ? threadIdx.x % 32 : 0;
  return reinterpret_cast<const std::uint32_t*>(&args)[line * 16];
}

// A use that next to never happens and has no consequence, or the reads would be left out.
__device__ __forceinline__ void await_arguments(std::uint32_t word) {
  __shared__ std::uint32_t unused;
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(&unused));
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x5bd1e995; @p st.shared.u32 [%1], %0; }" ::"r"(word), "r"(address));
}

// A contiguous range of the keys of one row, worked on by one block or cluster.
struct Piece {
  std::uint32_t batch;
  std::uint32_t row_in_batch; // kv_head * rows_per_kv_head + row
  std::uint32_t length;       // of the row
  KeyRange keys;
  bool whole; // all keys of the row: nothing to merge with
};

// Where the pieces of a row that is not whole leave their partial states, and who merges them.
struct Cut {
  std::uint32_t index, count;           // of this piece, of all pieces
  std::uint64_t first_slot, other_slot; // piece 0 lies in slot first_slot, piece i in other_slot + i
  std::uint32_t counter;
  bool shared; // by several blocks, so that the counter tells which one is last
};

__device__ __forceinline__ std::uint64_t slot_of(const Cut& cut, std::uint32_t index) {
  return index == 0 ? cut.first_slot : cut.other_slot + index;
}

// Heads of a piece's row.
struct Heads {
  std::uint32_t kv_head;
  std::uint32_t first_query_head;
  int count;
};

// Those of one of the row's tiles; a tile past the last has a count of 0 or less.
__device__ __forceinline__ Heads tile_of(const Heads& row, int tile, int tile_heads) {
  return {row.kv_head, row.first_query_head + tile * tile_heads, row.count - tile * tile_heads};
}

__device__ __forceinline__ Heads heads_of(const KernelArguments& args, std::uint32_t row_in_batch) {
  const std::uint32_t kv_head = args.rows_per_kv_head == 1 ? row_in_batch : row_in_batch / args.rows_per_kv_head;
  const int first = static_cast<int>(row_in_batch - kv_head * args.rows_per_kv_head) * args.row_heads;
  return {kv_head, kv_head * args.group + first, min(args.row_heads, args.group - first)};
}

__device__ __forceinline__ std::uint32_t row_keys(const AttentionProblem& problem, std::uint32_t length) {
  const KeyRange keys = attended_keys(problem, length);
  return keys.end - keys.begin;
}

// A block's share of a walk: where it starts. The first `larger` blocks get each + 1 units, the others `each`.
struct WalkShare {
  std::uint32_t each = 0, larger = 0;
  std::uint32_t units = 0; // of this block
  std::uint32_t batch = 0; // row, and unit of the row, where it starts
  std::uint32_t row_in_batch = 0;
  std::uint32_t first = 0;

  __device__ std::uint64_t begin() const {
    return static_cast<std::uint64_t>(blockIdx.x) * each + min(blockIdx.x, larger);
  }
  // No share is empty between two that are not.
  __device__ std::uint32_t block_of(std::uint64_t unit) const {
    const std::uint64_t of_larger = static_cast<std::uint64_t>(larger) * (each + 1);
    return unit < of_larger ? static_cast<std::uint32_t>(unit / (each + 1))
                            : larger + static_cast<std::uint32_t>((unit - of_larger) / each);
  }
};

// Units of all rows of one batch entry; 0 past the last.
__device__ __forceinline__ std::uint64_t batch_units(const KernelArguments& args, std::int64_t batch) {
  if (batch >= args.problem.batch) {
    return 0;
  }
  const std::uint32_t keys = row_keys(args.problem, row_length(args.problem, batch));
  return static_cast<std::uint64_t>(units_of(keys, args.plan.unit_keys)) * args.rows_per_batch;
}

// Sums over 32 batch entries, one a lane: of the lane's own, and of all up to it.
struct BatchSums {
  std::uint64_t own, up_to;
  __device__ __forceinline__ explicit BatchSums(std::uint64_t units) : own(units), up_to(units) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned distance = 1; distance < 32; distance *= 2) {
      const std::uint64_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
      up_to += lane >= distance ? other : 0;
    }
  }
  __device__ __forceinline__ std::uint64_t all() const {
    return __shfl_sync(0xffffffffu, up_to, 31);
  }
};

// x / y, fast where both fit into 32 bits, as they nearly always do.
__device__ __forceinline__ std::uint64_t divide(std::uint64_t x, std::uint64_t y) {
  return (x | y) >> 32 == 0 ? static_cast<std::uint32_t>(x) / static_cast<std::uint32_t>(y) : x / y;
}

// Rows with differing lengths are counted on the device: every warp scans them by itself, so that no barrier is needed.
__device__ __forceinline__ WalkShare find_share(const KernelArguments& args) {
  const unsigned lane = threadIdx.x % 32;
  const std::uint32_t rows_per_batch = args.rows_per_batch;
  const bool counted = args.plan.units == 0;
  BatchSums sums(counted ? batch_units(args, lane) : 0); // of the first 32
  std::uint64_t total = counted ? sums.all() : args.plan.units;
#pragma unroll 1
  for (std::int64_t base = 32; counted && base < args.problem.batch; base += 32) {
    total += BatchSums(batch_units(args, base + lane)).all();
  }
  WalkShare share;
  share.each = static_cast<std::uint32_t>(divide(total, args.plan.blocks));
  share.larger = static_cast<std::uint32_t>(total - static_cast<std::uint64_t>(share.each) * args.plan.blocks);
  share.units = share.each + (blockIdx.x < share.larger ? 1 : 0);
  if (share.units == 0) {
    return share;
  }
  const std::uint64_t begin = share.begin();
  std::uint64_t offset = begin; // of the share's start in its batch entry
  std::uint64_t row_units = args.plan.splits_per_row;
  if (!counted) {
    const std::uint64_t units_per_batch = row_units * rows_per_batch; // rows are alike
    share.batch = static_cast<std::uint32_t>(divide(begin, units_per_batch));
    offset = begin - share.batch * units_per_batch;
  } else {
#pragma unroll 1
    for (std::int64_t base = 0;; base += 32, sums = BatchSums(batch_units(args, base + lane))) {
      const unsigned reached = __ballot_sync(0xffffffffu, sums.up_to > offset);
      if (reached != 0) {
        const int source = __ffs(reached) - 1;
        offset -= __shfl_sync(0xffffffffu, sums.up_to - sums.own, source);
        share.batch = static_cast<std::uint32_t>(base) + source;
        row_units = divide(__shfl_sync(0xffffffffu, sums.own, source), rows_per_batch);
        break;
      }
      offset -= sums.all();
    }
  }
  share.row_in_batch = static_cast<std::uint32_t>(divide(offset, row_units));
  share.first = static_cast<std::uint32_t>(offset - share.row_in_batch * row_units);
  return share;
}

__device__ __forceinline__ RowUnits counted_row(const KernelArguments& args, std::int64_t batch) {
  const std::uint32_t length = row_length(args.problem, batch);
  const KeyRange keys = attended_keys(args.problem, length);
  return {length, keys, units_of(keys.end - keys.begin, args.plan.unit_keys)};
}

__device__ __forceinline__ RowUnits row_units(const KernelArguments& args, std::int64_t batch) {
  return args.problem.lengths == nullptr ? args.uniform : counted_row(args, batch);
}

// What a block works on in by_row mode: the share of its cluster in the row's keys.
struct RowShare {
  KeyRange keys;
  std::uint32_t cluster, clusters; // that share the row; this one has no work if cluster >= clusters
};

__device__ __forceinline__ RowShare share_row(const KernelArguments& args, KeyRange row, const ClusterShares& shares) {
  const SplitPlan& plan = args.plan;
  RowShare share{row, 0, 1};
  if (plan.clusters > 1) {
    const std::uint32_t keys = row.end - row.begin;
    share.cluster = blockIdx.x >> log2_floor(plan.cluster_size);
    share.clusters = shares.clusters;
    const std::uint32_t begin = min(keys, share.cluster * shares.each);
    // Without keys not even the step that would hold the first one takes place.
    share.keys =
        begin == keys ? KeyRange{0, 0} : KeyRange{row.begin + begin, row.begin + min(keys, begin + shares.each)};
  }
  return share;
}

__device__ __forceinline__ Cut cut_by_row(const KernelArguments& args, const RowShare& share) {
  const std::uint32_t row = blockIdx.z * gridDim.y + blockIdx.y;
  const std::uint64_t slot = static_cast<std::uint64_t>(row) * args.plan.clusters;
  const std::uint32_t rank = blockIdx.x & (args.plan.cluster_size - 1);
  return {share.cluster, share.clusters, slot, slot, row * args.plan.cluster_size + rank, true};
}

// The pieces of this block, in order: the one of by_row mode, or those of its share of a walk. A copy of the iterator
// can run ahead of another.
template <Path path>
class Pieces {
  static constexpr bool plain = path == Path::plain;

public:
  __device__ __forceinline__ explicit Pieces(const KernelArguments& args) : args_(args) {
    if (walks<path>(args)) {
      share_ = find_share(args);
      left_ = share_.units;
      batch_ = share_.batch;
      row_in_batch_ = share_.row_in_batch;
      first_ = share_.first;
      if (left_ != 0) {
        row_ = row_units(args, batch_);
      }
      return;
    }
    batch_ = blockIdx.z;
    row_in_batch_ = blockIdx.y;
    ClusterShares shares = args.uniform_shares;
    if (plain || args.problem.lengths == nullptr) {
      row_ = args.uniform;
    } else {
      row_.length = row_length(args.problem, batch_);
      row_.keys = attended_keys(args.problem, row_.length);
      shares = shares_of(args.plan, row_.keys.end - row_.keys.begin);
    }
    by_row_ = share_row(args, row_.keys, shares);
    row_.keys = by_row_.keys;
    row_.units = 1;
    left_ = by_row_.cluster < by_row_.clusters ? 1 : 0;
  }

  __device__ __forceinline__ bool done() const { return left_ == 0; }

  // The next piece; false when there is none.
  __device__ __forceinline__ bool next(Piece& piece) {
    if (left_ == 0) {
      return false;
    }
    piece.batch = batch_;
    piece.row_in_batch = row_in_batch_;
    piece.length = row_.length;
    if (!may_walk<path>) {
      piece.keys = row_.keys;
      piece.whole = by_row_.clusters == 1;
      left_ = 0;
      return true;
    }
    const std::uint32_t unit = args_.plan.unit_keys;
    const std::uint32_t taken = args_.plan.pieces_are_units ? 1 : min(left_, row_.units - first_);
    piece.keys.begin = row_.keys.begin + first_ * unit;
    piece.keys.end = first_ + taken == row_.units ? row_.keys.end : piece.keys.begin + taken * unit;
    piece.whole = taken == row_.units && by_row_.clusters == 1;
    left_ -= taken;
    first_ += taken;
    if (first_ == row_.units && left_ != 0) {
      first_ = 0;
      if (++row_in_batch_ == args_.rows_per_batch) {
        row_in_batch_ = 0;
        row_ = row_units(args_, ++batch_);
      }
    }
    return true;
  }

  // The cut of the piece that next() has just given; only for pieces that are not whole.
  __device__ __forceinline__ Cut cut(const Piece& piece) const {
    if (!walks<path>(args_)) {
      return cut_by_row(args_, by_row_);
    }
    const SplitPlan& plan = args_.plan;
    Cut cut;
    const KeyRange keys = attended_keys(args_.problem, piece.length);
    const std::uint32_t units = units_of(keys.end - keys.begin, plan.unit_keys);
    const std::uint32_t first = (piece.keys.begin - keys.begin) / plan.unit_keys;
    const std::uint32_t taken = units_of(piece.keys.end - piece.keys.begin, plan.unit_keys);
    const std::uint64_t row_begin = share_.begin() + (share_.units - left_) - taken - first;
    const std::uint32_t first_block = share_.block_of(row_begin);
    const std::uint32_t last_block = share_.block_of(row_begin + units - 1);
    cut.counter = first_block; // at most one row that is shared starts in a block
    cut.shared = first_block != last_block;
    if (plan.pieces_are_units) {
      cut.index = first;
      cut.count = units;
      cut.first_slot = cut.other_slot =
          (static_cast<std::uint64_t>(piece.batch) * args_.rows_per_batch + piece.row_in_batch) * plan.splits_per_row;
    } else {
      // A block has at most two such pieces: one that goes on with a row, one that starts a row.
      cut.index = blockIdx.x - first_block;
      cut.count = last_block - first_block + 1;
      cut.first_slot = static_cast<std::uint64_t>(plan.blocks) + first_block;
      cut.other_slot = first_block;
    }
    return cut;
  }

private:
  const KernelArguments& args_;
  RowShare by_row_ = {{0, 0}, 0, 1};
  WalkShare share_;
  std::uint32_t left_ = 0; // units not given yet
  // The row that is being cut, and the unit of it that comes next.
  std::uint32_t batch_ = 0, row_in_batch_ = 0, first_ = 0;
  RowUnits row_ = {0, {0, 0}, 0};
};

} // namespace single_query
