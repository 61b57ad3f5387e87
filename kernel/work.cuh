// What a thread block works on: the kernel's arguments, pieces of rows, and the walk over a block's share of them.
#pragma once

#include "split_plan.h"

#include <cuda/std/cstdint>

namespace single_query {

// Counters at the start of every workspace, zero between calls; partial states follow them.
constexpr std::uint32_t workspace_counters = 4096;

struct KernelArguments {
  AttentionProblem problem;
  SplitPlan plan;
  std::uint32_t least_block_keys; // of the body, for clusters_in_use
  int group;                      // query heads per key/value head
  int tile_heads;                 // query heads of a full tile
  int tiles;                      // tiles per key/value head
  // Bytes that one copy instruction may move: 16 or 4, or (elements of 16 bits) 2, as the alignment allows.
  int query_copy_bytes, key_copy_bytes, value_copy_bytes;
  bool output_vectors; // output elements can be stored four at a time
  // Workspace. Partial states: [slot][element] with an element of four head dims, see merge_partials.cuh.
  std::uint32_t* counters;
  float4* partial_values;
  float2* partial_states;
};

// A contiguous range of the keys of one row, worked on by one block or cluster.
struct Piece {
  std::int64_t batch;
  std::uint32_t row_in_batch; // kv_head * tiles + tile
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
  int count; // 1 .. tile_heads
};

__device__ __forceinline__ Heads heads_of(const KernelArguments& args, std::uint32_t row_in_batch) {
  const std::uint32_t kv_head = args.tiles == 1 ? row_in_batch : row_in_batch / args.tiles;
  const int first = static_cast<int>(row_in_batch - kv_head * args.tiles) * args.tile_heads;
  return {kv_head, kv_head * args.group + first, min(args.tile_heads, args.group - first)};
}

// The pieces of this block, in order: the one of by_row mode, or those of its share of a walk. Rows with differing
// lengths are counted on the device: every warp scans them by itself, so that no barrier is needed, and a copy of the
// iterator can run ahead of another.
class Pieces {
public:
  // rank: of the block in its cluster.
  __device__ Pieces(const KernelArguments& args, int rank) : args_(args) {
    if (args.plan.walk) {
      start_walk();
    } else {
      start_row(rank);
    }
  }

  __device__ bool done() const { return left_ == 0; }

  // The next piece; false when there is none.
  __device__ bool next(Piece& piece) {
    if (left_ == 0) {
      return false;
    }
    const std::uint32_t unit = args_.plan.unit_keys;
    const std::uint32_t taken = args_.plan.pieces_are_units ? 1 : min(left_, row_units_ - first_);
    piece.batch = batch_;
    piece.row_in_batch = row_in_batch_;
    piece.length = length_;
    piece.keys.begin = keys_.begin + first_ * unit;
    piece.keys.end = first_ + taken == row_units_ ? keys_.end : piece.keys.begin + taken * unit;
    piece.whole = taken == row_units_ && clusters_ == 1;
    left_ -= taken;
    first_ += taken;
    if (first_ == row_units_ && left_ != 0) {
      first_ = 0;
      if (++row_in_batch_ == rows_per_batch_) {
        row_in_batch_ = 0;
        ++batch_;
        enter_batch();
      }
    }
    return true;
  }

  // The cut of the piece that next() has just given; only for pieces that are not whole.
  __device__ Cut cut(const Piece& piece) const { return args_.plan.walk ? cut_of_walk(piece) : cut_of_row(piece); }

private:
  __device__ void start_row(int rank) {
    const SplitPlan& plan = args_.plan;
    batch_ = blockIdx.z;
    row_in_batch_ = blockIdx.y;
    length_ = row_length(args_.problem, batch_);
    keys_ = attended_keys(args_.problem, length_);
    row_units_ = left_ = 1;
    if (plan.clusters > 1) {
      const std::uint32_t keys = keys_.end - keys_.begin;
      const std::uint32_t cluster = blockIdx.x / plan.cluster_size;
      clusters_ = clusters_in_use(plan, keys, args_.least_block_keys);
      // Shares of whole 64-key steps: equal work for the warps of a block.
      const std::uint32_t share = (units_of(keys, clusters_) + 63) / 64 * 64;
      const std::uint32_t begin = min(keys, cluster * share);
      keys_ = {keys_.begin + begin, keys_.begin + min(keys, begin + share)};
      left_ = cluster < clusters_ ? 1 : 0;
    }
    rank_ = rank;
  }

  __device__ Cut cut_of_row(const Piece& piece) const {
    const std::uint32_t row = static_cast<std::uint32_t>(piece.batch) * gridDim.y + piece.row_in_batch;
    const std::uint64_t slot = static_cast<std::uint64_t>(row) * args_.plan.clusters;
    return {blockIdx.x / args_.plan.cluster_size, clusters_, slot, slot, row * args_.plan.cluster_size + rank_, true};
  }

  __device__ void start_walk() {
    const KernelArguments& args = args_;
    rows_per_batch_ = static_cast<std::uint32_t>(args.problem.kv_heads) * args.tiles;
    total_ = args.plan.units != 0 ? args.plan.units : count_units();
    // No share may be empty between two that are not: a row counts the blocks from its first to its last.
    blocks_ = total_ < args.plan.blocks ? static_cast<std::uint32_t>(total_) : args.plan.blocks;
    if (blockIdx.x >= blocks_) {
      return;
    }
    const std::uint64_t begin = share_begin(blockIdx.x);
    share_ = static_cast<std::uint32_t>(share_begin(blockIdx.x + 1) - begin);
    left_ = share_;
    std::uint64_t row = 0;
    if (args.plan.units != 0) {
      row = begin / args.plan.splits_per_row; // rows are alike
      batch_ = row / rows_per_batch_;
      row_in_batch_ = static_cast<std::uint32_t>(row - batch_ * rows_per_batch_);
      first_ = static_cast<std::uint32_t>(begin - row * args.plan.splits_per_row);
      enter_batch();
    } else {
      find_start(begin);
    }
  }

  __device__ Cut cut_of_walk(const Piece& piece) const {
    const SplitPlan& plan = args_.plan;
    const std::uint32_t keys_before = piece.keys.begin - attended_keys(args_.problem, piece.length).begin;
    const std::uint32_t units = units_of(row_keys(piece.length), plan.unit_keys);
    const std::uint32_t first = keys_before / plan.unit_keys;
    const std::uint32_t taken = plan.pieces_are_units ? 1 : units_of(piece.keys.end - piece.keys.begin, plan.unit_keys);
    const std::uint64_t row_begin = share_begin(blockIdx.x) + (share_ - left_) - taken - first;
    const std::uint32_t first_block = block_of(row_begin);
    const std::uint32_t last_block = block_of(row_begin + units - 1);
    Cut cut;
    cut.counter = first_block; // at most one row that is shared starts in a block
    cut.shared = first_block != last_block;
    if (plan.pieces_are_units) {
      cut.index = first;
      cut.count = units;
      cut.first_slot = (piece.batch * rows_per_batch_ + piece.row_in_batch) * plan.splits_per_row;
      cut.other_slot = cut.first_slot;
    } else {
      // A block has at most two such pieces: one that goes on with a row, one that starts a row.
      cut.index = blockIdx.x - first_block;
      cut.count = last_block - first_block + 1;
      cut.first_slot = static_cast<std::uint64_t>(plan.blocks) + first_block;
      cut.other_slot = first_block;
    }
    return cut;
  }

  __device__ std::uint64_t share_begin(std::uint32_t block) const { return total_ * block / blocks_; }

  __device__ std::uint32_t block_of(std::uint64_t unit) const {
    return static_cast<std::uint32_t>(((unit + 1) * blocks_ - 1) / total_);
  }

  __device__ std::uint32_t row_keys(std::uint32_t length) const {
    const KeyRange keys = attended_keys(args_.problem, length);
    return keys.end - keys.begin;
  }

  __device__ void enter_batch() {
    length_ = row_length(args_.problem, batch_);
    keys_ = attended_keys(args_.problem, length_);
    row_units_ = units_of(keys_.end - keys_.begin, args_.plan.unit_keys);
  }

  // Units of all rows of one batch entry; 0 past the last.
  __device__ std::uint64_t batch_units(std::int64_t batch) const {
    return batch < args_.problem.batch
               ? static_cast<std::uint64_t>(units_of(row_keys(row_length(args_.problem, batch)), args_.plan.unit_keys)) *
                     rows_per_batch_
               : 0;
  }

  __device__ std::uint64_t count_units() const {
    std::uint64_t sum = 0;
    for (std::int64_t batch = threadIdx.x % 32; batch < args_.problem.batch; batch += 32) {
      sum += batch_units(batch);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    return sum;
  }

  // The row and the unit within it where unit `begin` of the whole list lies: a warp-wide scan, 32 batch entries at a
  // time.
  __device__ void find_start(std::uint64_t begin) {
    const unsigned lane = threadIdx.x % 32;
    std::uint64_t before = 0;
    for (std::int64_t base = 0;; base += 32) {
      const std::uint64_t own = batch_units(base + lane);
      std::uint64_t sum = own; // inclusive
      for (unsigned offset = 1; offset < 32; offset *= 2) {
        const std::uint64_t other = __shfl_up_sync(0xffffffffu, sum, offset);
        sum += lane >= offset ? other : 0;
      }
      const unsigned reached = __ballot_sync(0xffffffffu, before + sum > begin);
      if (reached != 0) {
        const int source = __ffs(reached) - 1;
        const std::uint64_t offset = begin - before - __shfl_sync(0xffffffffu, sum - own, source);
        batch_ = base + source;
        enter_batch();
        row_in_batch_ = static_cast<std::uint32_t>(offset / row_units_);
        first_ = static_cast<std::uint32_t>(offset - static_cast<std::uint64_t>(row_in_batch_) * row_units_);
        return;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
  }

  const KernelArguments& args_;
  int rank_ = 0;
  std::uint32_t clusters_ = 1;         // by_row: of this row
  std::uint64_t total_ = 0;            // walk: units of all rows
  std::uint32_t blocks_ = 0;           // walk: that have work
  std::uint32_t share_ = 0, left_ = 0; // units of this block's share, and those not given yet
  std::uint32_t rows_per_batch_ = 0;
  // The row that is being cut, and the unit of it that comes next.
  std::int64_t batch_ = 0;
  std::uint32_t row_in_batch_ = 0, first_ = 0, row_units_ = 0, length_ = 0;
  KeyRange keys_ = {0, 0};
};

} // namespace single_query
