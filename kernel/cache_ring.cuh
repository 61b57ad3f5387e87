// The load path of the tensor-core body: each warp streams its own steps of 16 keys from the cache into a ring of
// stages in shared memory, far enough ahead that reads never stop; nobody but the warp itself waits for them.
//
// A stage is a K tile and a V tile, [16 keys][padded_dim] of 16-bit elements, stored as padded_dim / 64 panels of 16
// rows of 128 bytes. Within a row the 16-byte chunks are XORed with the row number, so that the eight rows of a matrix
// lie in different banks without padding (rows must not straddle 128-byte lines: that costs 6 % of bandwidth).
// Keys past the end of a piece and dims past head_dim are filled with zeros and not read.
#pragma once

#include "work.cuh"

#include <cuda_pipeline_primitives.h>

namespace single_query {

using Element = std::uint16_t; // float16 or bfloat16: moving them is all the same

constexpr int step_keys = 16; // keys of one warp step: the M side of the matrix instruction

template <int padded_dim>
struct CacheRing {
  static constexpr int stages = padded_dim >= 128 ? 2 : 4;
  static constexpr int tile_bytes = step_keys * padded_dim * 2;
  static constexpr int warp_bytes = stages * 2 * tile_bytes;
  static constexpr int in_flight = 2 * stages - 1; // copy groups that may be pending when the oldest tile is needed

  // Where 16-byte chunk `chunk` of row `row` lies in a tile.
  static constexpr int panel_bytes = step_keys * 128;
  static __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return chunk / 8 * panel_bytes + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
  }
  static __device__ __forceinline__ unsigned char* chunk_address(unsigned char* tile, int row, int chunk) {
    return tile + chunk_offset(row, chunk);
  }
  static __device__ __forceinline__ unsigned char* key_tile(unsigned char* ring, int stage) {
    return ring + stage * 2 * tile_bytes;
  }
  static __device__ __forceinline__ unsigned char* value_tile(unsigned char* ring, int stage) {
    return key_tile(ring, stage) + tile_bytes;
  }
};

// Copies `copy_bytes` (16 or 4) asynchronously, of which the first `valid` come from `source`, the rest are zeros.
template <int copy_bytes>
__device__ __forceinline__ void copy_async(void* destination, const void* source, int valid) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(destination));
  if constexpr (copy_bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(valid) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(source), "r"(valid) : "memory");
  }
}

// One tile, any alignment. Lane l knows where row l % 16 begins, in elements from `head`; negative: nothing to read.
template <int padded_dim>
__device__ __forceinline__ void copy_tile_by_chunks(unsigned char* tile, const Element* head, std::int64_t own_row,
                                                    int head_dim) {
  constexpr int row_lanes = padded_dim / 8;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int chunk = lane % row_lanes;
#pragma unroll
  for (int i = 0; i < step_keys * row_lanes / 32; ++i) {
    const int row = i * (32 / row_lanes) + lane / row_lanes;
    const std::int64_t offset = __shfl_sync(0xffffffffu, own_row, row);
    const bool valid = offset >= 0 && chunk * 8 < head_dim;
    copy_async<16>(CacheRing<padded_dim>::chunk_address(tile, row, chunk), head + (valid ? offset + chunk * 8 : 0),
                   valid ? 16 : 0);
  }
}

// The same by pairs of elements where chunks are not aligned: asynchronously where pairs are (copy_bytes 4). Out of
// line and with plain arguments, so that the fast path stays small and in registers.
template <int padded_dim>
__device__ __noinline__ void copy_tile_out_of_line(unsigned char* tile, const Element* head, std::int64_t own_row,
                                                   int head_dim, int copy_bytes) {
  if (copy_bytes == 16) {
    copy_tile_by_chunks<padded_dim>(tile, head, own_row, head_dim);
    return;
  }
#pragma unroll 2
  for (int row = 0; row < step_keys; ++row) {
    const std::int64_t offset = __shfl_sync(0xffffffffu, own_row, row);
#pragma unroll
    for (int i = 0; i < padded_dim / 64; ++i) {
      const int pair = i * 32 + static_cast<int>(threadIdx.x % 32);
      unsigned char* destination = CacheRing<padded_dim>::chunk_address(tile, row, pair / 4) + pair % 4 * 4;
      const int valid = offset < 0 ? 0 : max(0, min(2, head_dim - 2 * pair));
      if (copy_bytes == 4) {
        copy_async<4>(destination, head + (valid > 0 ? offset + 2 * pair : 0), 2 * valid);
      } else {
        const Element* bits = head + offset + 2 * pair;
        const std::uint32_t low = valid > 0 ? __ldg(bits) : 0;
        const std::uint32_t high = valid > 1 ? __ldg(bits + 1) : 0;
        *reinterpret_cast<std::uint32_t*>(destination) = low | high << 16;
      }
    }
  }
}

// One warp's reads of the cache, step by step over the pieces of its block, some stages ahead of the arithmetic.
// Sequence per step: copy_keys(stage), copy_values(stage), advance().
template <int padded_dim, Path path>
class CacheReader {
  static constexpr bool may_page = path != Path::plain;
  static constexpr bool general = path == Path::general;
  using Ring = CacheRing<padded_dim>;
  static constexpr int row_lanes = padded_dim / 8; // 16-byte chunks of a row
  static constexpr int rows_at_once = 32 / row_lanes;
  static constexpr int pattern = 8 / rows_at_once; // copies after which the XOR of rows and chunks repeats

public:
  // first_key: of this warp, relative to a piece's begin; stride: keys that all warps take in a step together.
  __device__ __forceinline__ CacheReader(const KernelArguments& args, unsigned char* ring, const Pieces<path>& pieces,
                                         std::uint32_t first_key, std::uint32_t stride)
      : args_(args), ring_(ring), pieces_(pieces), first_key_(first_key), stride_(stride) {
#pragma unroll
    for (int i = 0; i < pattern; ++i) {
      destination_[i] = Ring::chunk_offset(i * rows_at_once + lane() / row_lanes, lane() % row_lanes);
    }
    next_piece();
  }

  // steady: in the main loop, where paged copies are worth their code; else they go out of line.
  template <bool steady>
  __device__ __forceinline__ void copy_keys(int stage) {
    const AttentionProblem& problem = args_.problem;
    copy_tile<steady>(Ring::key_tile(ring_, stage), problem.key, problem.key_stride_head, problem.key_stride_page,
                      problem.key_stride_slot, args_.key_copy_bytes, key_row_);
    if (may_page && problem.page_table != nullptr) {
      const bool missing = key_ + lane() % step_keys < end_ && !page_exists(problem, slot_.page);
      const unsigned bit = 1u << stage;
      missing_ = __any_sync(0xffffffffu, missing) ? missing_ | bit : missing_ & ~bit;
    }
  }

  template <bool steady>
  __device__ __forceinline__ void copy_values(int stage) {
    const AttentionProblem& problem = args_.problem;
    copy_tile<steady>(Ring::value_tile(ring_, stage), problem.value, problem.value_stride_head,
                      problem.value_stride_page, problem.value_stride_slot, args_.value_copy_bytes, value_row_);
  }

  __device__ __forceinline__ void advance() {
    key_ += stride_;
    if (key_ < end_) {
      key_row_ += args_.key_step;
      value_row_ += args_.value_step;
      look_up_page();
    } else {
      next_piece();
    }
  }

  // Whether the tiles in this stage needed a page that does not exist.
  __device__ __forceinline__ bool misses_page(int stage) const {
    return may_page && (missing_ >> stage & 1) != 0;
  }

private:
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x % 32);
  }

  __device__ __forceinline__ void next_piece() {
    Piece piece;
    do {
      if (!pieces_.next(piece)) {
        key_ = end_ = 0; // nothing is in range any more
        return;
      }
      key_ = piece.keys.begin + first_key_;
      end_ = piece.keys.end;
    } while (key_ >= end_);
    const AttentionProblem& problem = args_.problem;
    batch_ = piece.batch;
    kv_head_ = heads_of(args_, piece.row_in_batch).kv_head;
    const std::int64_t row = key_ + lane() / row_lanes;
    const int dim = lane() % row_lanes * 8;
    key_row_ = static_cast<const Element*>(problem.key) + batch_ * problem.key_stride_page +
               kv_head_ * problem.key_stride_head + row * problem.key_stride_slot + dim;
    value_row_ = static_cast<const Element*>(problem.value) + batch_ * problem.value_stride_page +
                 kv_head_ * problem.value_stride_head + row * problem.value_stride_slot + dim;
    look_up_page();
  }

  // One read of the table a step, under way a whole step before its result is needed.
  __device__ __forceinline__ void look_up_page() {
    if (may_page && args_.problem.page_table != nullptr) {
      const std::uint32_t key = key_ + lane() % step_keys;
      slot_ = key < end_ ? key_slot(args_.problem, batch_, key) : KeySlot{-1, 0};
    }
  }

  // Start of row lane % 16 of the coming step; negative: nothing to read.
  __device__ __forceinline__ std::int64_t own_row(std::int64_t stride_page, std::int64_t stride_slot) const {
    const std::uint32_t key = key_ + lane() % step_keys;
    if (key >= end_) {
      return -1;
    }
    if (args_.problem.page_table == nullptr) {
      return batch_ * stride_page + key * stride_slot;
    }
    return page_exists(args_.problem, slot_.page) ? slot_.page * stride_page + slot_.slot * stride_slot : -1;
  }

  // source: this lane's part of its first row, in a contiguous cache.
  template <bool steady>
  __device__ __forceinline__ void copy_tile(unsigned char* tile, const void* cache, std::int64_t stride_head,
                                            std::int64_t stride_page, std::int64_t stride_slot, int copy_bytes,
                                            const Element* source) {
    const int head_dim = static_cast<int>(args_.problem.head_dim);
    const bool paged = args_.problem.page_table != nullptr;
    if (general && (copy_bytes < 16 || (!steady && paged))) {
      copy_tile_out_of_line<padded_dim>(tile, static_cast<const Element*>(cache) + kv_head_ * stride_head,
                                        own_row(stride_page, stride_slot), head_dim, copy_bytes);
    } else if (key_ < end_ && may_page && paged) {
      copy_tile_by_chunks<padded_dim>(tile, static_cast<const Element*>(cache) + kv_head_ * stride_head,
                                      own_row(stride_page, stride_slot), head_dim);
    } else if (key_ < end_) {
      const int chunk = lane() % row_lanes;
      const int first_row = lane() / row_lanes;
      const int rows = chunk * 8 < head_dim ? static_cast<int>(min(end_ - key_, 16u)) - first_row : 0;
#pragma unroll
      for (int i = 0; i < step_keys / rows_at_once; ++i) {
        // Of a row that is not there nothing is read, so its address does not matter.
        const bool valid = i * rows_at_once < rows;
        copy_async<16>(tile + destination_[i % pattern] + i / pattern * 1024, source, valid ? 16 : 0);
        source += rows_at_once * stride_slot;
      }
    }
    __pipeline_commit();
  }

  const KernelArguments& args_;
  unsigned char* ring_;
  int destination_[pattern]; // of this lane's copies in a tile
  Pieces<path> pieces_;
  std::uint32_t first_key_, stride_;
  std::uint32_t key_ = 0, end_ = 0; // first key of the coming step, end of its piece
  const Element* key_row_ = nullptr;
  const Element* value_row_ = nullptr;
  std::uint32_t batch_ = 0;
  std::uint32_t kv_head_ = 0;
  KeySlot slot_ = {0, 0}; // of key key_ + lane % 16
  unsigned missing_ = 0;  // a bit per stage
};

} // namespace single_query
