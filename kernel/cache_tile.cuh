// How 16 keys lie in shared memory, and copies to there of rows that are not 16 equally spaced ones of whole 16-byte
// chunks.
//
// A tile is [16 keys][padded_dim] of 16-bit elements, stored as padded_dim / 64 panels of 16 rows of 128 bytes. Within
// a row the 16-byte chunks are XORed with the row number, so that the eight rows of a matrix lie in different banks
// without padding (rows must not straddle 128-byte lines: that costs 6 % of bandwidth). Keys that take no part and dims
// past head_dim are filled with zeros and not read.
#pragma once

#include <cuda/std/cstdint>
#include <cuda_runtime.h>

namespace single_query {

using Element = std::uint16_t; // float16 or bfloat16: moving them is all the same

constexpr int step_keys = 16; // keys of one warp step: the M side of the matrix instruction

template <int padded_dim>
struct CacheTile {
  static constexpr int bytes = step_keys * padded_dim * 2;
  static constexpr int panel_bytes = step_keys * 128;
  // Where 16-byte chunk `chunk` of row `row` lies.
  static constexpr __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return chunk / 8 * panel_bytes + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
  }
  // The same of byte `byte` of a row.
  static constexpr __device__ __forceinline__ int byte_offset(int row, int byte) {
    return chunk_offset(row, byte / 16) + byte % 16;
  }
};

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Copies `width` bytes (16, 8 or 4) asynchronously, of which the first `valid` come from `source`, the rest are zeros.
template <int width>
__device__ __forceinline__ void copy_async(std::uint32_t destination, const void* source, int valid) {
  if constexpr (width == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(destination), "l"(source), "r"(valid), "n"(width)
                 : "memory");
  }
}

// Where the rows of a step begin. 16 rows that are equally far apart,
struct SpacedRows {
  static constexpr bool all_there = true;
  const Element* first;
  std::int64_t stride;
  __device__ __forceinline__ const Element* at(int row) const { return first + row * stride; }
};

// or any: lane l knows row l % 16, in elements from `head`; negative: nothing to read.
struct ScatteredRows {
  static constexpr bool all_there = false;
  const Element* head;
  std::int64_t own;
  __device__ __forceinline__ const Element* at(int row) const {
    const std::int64_t offset = __shfl_sync(0xffffffffu, own, row);
    return offset < 0 ? nullptr : head + offset;
  }
};

// How rows lie with respect to the pieces that they are copied in.
enum class RowEnds {
  whole,   // rows are whole pieces
  partial, // rows begin with a piece and end anywhere
  late     // rows may begin in the middle of a piece: they are copied from its begin on, and align_rows() mends that
};

// By pieces of `width` bytes; row_bytes of every row are copied. Out of line and with
// plain arguments, so that the fast path stays small and in registers.
template <int padded_dim, int width, RowEnds ends, class Rows>
__device__ __noinline__ void copy_rows_by(unsigned char* tile, Rows rows, int row_bytes) {
  constexpr int row_pieces = padded_dim * 2 / width;
  constexpr int rounds = row_pieces > 32 ? row_pieces / 32 : 1; // copies of a row
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t address = shared_address(tile);
  int valid_bytes[rounds][2]; // of a row that begins with a piece, and of one that begins in the middle of one
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int left = row_bytes - (round * 32 + lane) % row_pieces * width;
    valid_bytes[round][0] = max(0, min(width, left));
    valid_bytes[round][1] = max(0, min(width, left + 2));
  }
#pragma unroll 8
  for (int i = 0; i < step_keys * row_pieces / 32; ++i) {
    const int row = row_pieces >= 32 ? i / rounds : i * (32 / row_pieces) + lane / row_pieces;
    const int byte = (i * 32 + lane) % row_pieces * width;
    auto begin = reinterpret_cast<std::uint64_t>(rows.at(row));
    int valid = valid_bytes[i % rounds][0];
    if (ends == RowEnds::late) {
      valid = begin % width == 0 ? valid : valid_bytes[i % rounds][1];
    }
    valid = ends == RowEnds::whole && valid > 0 ? width : valid; // which the compiler has to be told
    valid = Rows::all_there || begin != 0 ? valid : 0;
    begin = ends == RowEnds::late ? begin & ~static_cast<std::uint64_t>(width - 1) : begin;
    // Where nothing is valid nothing is read, so the address does not matter.
    copy_async<width>(address + CacheTile<padded_dim>::byte_offset(row, byte),
                      reinterpret_cast<const void*>(begin + byte), valid);
  }
}

// Element by element, and done when it returns.
template <int padded_dim, class Rows>
__device__ __noinline__ void copy_rows_singly(unsigned char* tile, Rows rows, int head_dim) {
#pragma unroll 1
  for (int row = 0; row < step_keys; ++row) {
    const Element* const begin = rows.at(row);
    for (int dim = static_cast<int>(threadIdx.x % 32); dim < padded_dim; dim += 32) {
      *reinterpret_cast<Element*>(tile + CacheTile<padded_dim>::byte_offset(row, dim * 2)) =
          begin != nullptr && dim < head_dim ? __ldg(begin + dim) : Element{0};
    }
  }
}

// Moves the rows whose bit is set in `late` one element towards their begin. For one warp, after its copies have
// arrived.
template <int padded_dim>
__device__ __noinline__ void align_rows(unsigned char* tile, unsigned late) {
  using Tile = CacheTile<padded_dim>;
  constexpr int words = padded_dim / 64; // of a row, a lane
  const int lane = static_cast<int>(threadIdx.x % 32);
  // This lane's word of row 0 and the one after it; those of row r lie at (word ^ r % 8 * 16) + r * 128.
  const std::uint32_t word = shared_address(tile) + Tile::byte_offset(0, lane * 4);
  const std::uint32_t next = shared_address(tile) + Tile::byte_offset(0, (lane + 1) * 4);
#pragma unroll
  for (int first = 0; first < step_keys; first += 8) { // so that the words in hand fit into registers
    std::uint32_t moved[8][words];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int i = 0; i < words; ++i) {
        const int further = (first + r) * 128 + i * Tile::panel_bytes;
        const std::uint32_t low = load_shared((word ^ (r * 16)) + further);
        const bool last = i == words - 1 && lane == 31;
        const std::uint32_t high = last ? 0u : load_shared((next ^ (r * 16)) + further);
        moved[r][i] = __funnelshift_r(low, high, (late >> (first + r) & 1) * 16);
      }
    }
    __syncwarp(); // all words have been read
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int i = 0; i < words; ++i) {
        store_shared((word ^ (r * 16)) + (first + r) * 128 + i * Tile::panel_bytes, moved[r][i]);
      }
    }
  }
  __syncwarp();
}

} // namespace single_query
