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

constexpr int step_keys = 16; // keys of one warp step: the M side of the matrix instruction

template <typename Scalar, int padded_dim>
struct CacheRing {
  static_assert(sizeof(Scalar) == 2);
  static constexpr int stages = padded_dim >= 128 ? 2 : 4;
  static constexpr int tile_bytes = step_keys * padded_dim * 2;
  static constexpr int warp_bytes = stages * 2 * tile_bytes;
  static constexpr int in_flight = 2 * stages - 1; // copy groups that may be pending when the oldest tile is needed

  // Address of 16-byte chunk `chunk` of row `row` in a tile.
  static __device__ __forceinline__ unsigned char* chunk_address(unsigned char* tile, int row, int chunk) {
    return tile + chunk / 8 * (step_keys * 128) + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
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

// The 16 keys of one warp step. With a page table lane l keeps the place of key l % 16.
struct Step {
  std::uint32_t key = 0, end = 0; // first key, end of the piece; key >= end: nothing to read
  std::int64_t batch = 0;
  KeySlot slot = {0, 0};
};

// Row `row` of the step in one of the two caches, or null if there is nothing to read. All lanes of the warp call it.
template <typename Scalar>
__device__ __forceinline__ const Scalar* step_row(const AttentionProblem& problem, const Step& step, int row,
                                                  const Scalar* head, std::int64_t stride_page,
                                                  std::int64_t stride_slot) {
  const std::uint32_t key = step.key + row;
  if (problem.page_table != nullptr) {
    const std::int64_t page = __shfl_sync(0xffffffffu, step.slot.page, row);
    const std::int64_t slot = __shfl_sync(0xffffffffu, step.slot.slot, row);
    return key < step.end && page_exists(problem, page) ? head + page * stride_page + slot * stride_slot : nullptr;
  }
  return key < step.end ? head + step.batch * stride_page + key * stride_slot : nullptr;
}

// A tile by pairs of elements, for any alignment: asynchronously where pairs are aligned (copy_bytes 4). Out of line
// and with plain arguments, so that the fast path stays small and in registers.
template <typename Scalar, int padded_dim>
__device__ __noinline__ void copy_tile_by_pairs(const AttentionProblem& problem, unsigned char* tile, Step step,
                                                const Scalar* head, std::int64_t stride_page, std::int64_t stride_slot,
                                                int copy_bytes) {
  const int head_dim = static_cast<int>(problem.head_dim);
#pragma unroll 4
  for (int row = 0; row < step_keys; ++row) {
    const Scalar* source = step_row(problem, step, row, head, stride_page, stride_slot);
#pragma unroll
    for (int i = 0; i < padded_dim / 64; ++i) {
      const int pair = i * 32 + static_cast<int>(threadIdx.x % 32);
      unsigned char* destination =
          CacheRing<Scalar, padded_dim>::chunk_address(tile, row, pair / 4) + pair % 4 * 4;
      const int valid = source == nullptr ? 0 : max(0, min(2, head_dim - 2 * pair));
      if (copy_bytes == 4) {
        copy_async<4>(destination, valid > 0 ? source + 2 * pair : head, 2 * valid);
      } else {
        const auto* bits = reinterpret_cast<const std::uint16_t*>(source) + 2 * pair;
        const std::uint32_t low = valid > 0 ? __ldg(bits) : 0;
        const std::uint32_t high = valid > 1 ? __ldg(bits + 1) : 0;
        *reinterpret_cast<std::uint32_t*>(destination) = low | high << 16;
      }
    }
  }
}

// One warp's reads of the cache, step by step over the pieces of its block, some stages ahead of the arithmetic.
// Sequence per step: copy_keys(stage), copy_values(stage), advance().
template <typename Scalar, int padded_dim>
class CacheReader {
  using Ring = CacheRing<Scalar, padded_dim>;

public:
  // first_key: of this warp, relative to a piece's begin; stride: keys that all warps take in a step together.
  __device__ CacheReader(const KernelArguments& args, unsigned char* ring, const Pieces& pieces, std::uint32_t first_key,
                         std::uint32_t stride)
      : args_(args), ring_(ring), pieces_(pieces), first_key_(first_key), stride_(stride) {
    next_piece();
  }

  __device__ __forceinline__ void copy_keys(int stage) {
    const AttentionProblem& problem = args_.problem;
    copy_tile(Ring::key_tile(ring_, stage), static_cast<const Scalar*>(problem.key) + kv_head_ * problem.key_stride_head,
              problem.key_stride_page, problem.key_stride_slot, args_.key_copy_bytes);
    if (problem.page_table != nullptr) {
      const bool missing = step_.key + lane() % step_keys < step_.end && !page_exists(problem, step_.slot.page);
      const unsigned bit = 1u << stage;
      missing_ = __any_sync(0xffffffffu, missing) ? missing_ | bit : missing_ & ~bit;
    }
  }

  __device__ __forceinline__ void copy_values(int stage) {
    const AttentionProblem& problem = args_.problem;
    copy_tile(Ring::value_tile(ring_, stage),
              static_cast<const Scalar*>(problem.value) + kv_head_ * problem.value_stride_head,
              problem.value_stride_page, problem.value_stride_slot, args_.value_copy_bytes);
  }

  __device__ __forceinline__ void advance() {
    step_.key += stride_;
    if (step_.key >= step_.end) {
      next_piece();
    } else {
      look_up_page();
    }
  }

  // Whether the tiles in this stage needed a page that does not exist.
  __device__ __forceinline__ bool misses_page(int stage) const { return (missing_ >> stage & 1) != 0; }

private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ void next_piece() {
    Piece piece;
    do {
      if (!pieces_.next(piece)) {
        step_.key = step_.end = 0;
        return;
      }
      step_.key = piece.keys.begin + first_key_;
      step_.end = piece.keys.end;
    } while (step_.key >= step_.end);
    step_.batch = piece.batch;
    kv_head_ = heads_of(args_, piece.row_in_batch).kv_head;
    look_up_page();
  }

  // So a page table costs one read a step, under way a whole step before its result is needed.
  __device__ __forceinline__ void look_up_page() {
    if (args_.problem.page_table != nullptr) {
      const std::uint32_t key = step_.key + lane() % step_keys;
      step_.slot = key < step_.end ? key_slot(args_.problem, step_.batch, key) : KeySlot{-1, 0};
    }
  }

  __device__ __forceinline__ void copy_tile(unsigned char* tile, const Scalar* head, std::int64_t stride_page,
                                            std::int64_t stride_slot, int copy_bytes) {
    if (step_.key < step_.end) {
      if (copy_bytes == 16) {
        constexpr int row_lanes = padded_dim / 8; // 16-byte chunks of a row
        constexpr int rows_at_once = 32 / row_lanes;
        const int chunk = lane() % row_lanes;
        const bool in_row = chunk * 8 < static_cast<int>(args_.problem.head_dim);
#pragma unroll
        for (int i = 0; i < step_keys / rows_at_once; ++i) {
          const int row = i * rows_at_once + lane() / row_lanes;
          const Scalar* source = step_row(args_.problem, step_, row, head, stride_page, stride_slot);
          const bool valid = source != nullptr && in_row;
          copy_async<16>(Ring::chunk_address(tile, row, chunk), valid ? source + chunk * 8 : head, valid ? 16 : 0);
        }
      } else {
        copy_tile_by_pairs<Scalar, padded_dim>(args_.problem, tile, step_, head, stride_page, stride_slot, copy_bytes);
      }
    }
    __pipeline_commit();
  }

  const KernelArguments& args_;
  unsigned char* ring_;
  Pieces pieces_;
  std::uint32_t first_key_, stride_;
  Step step_;
  std::uint32_t kv_head_ = 0;
  unsigned missing_ = 0; // a bit per stage
};

} // namespace single_query
