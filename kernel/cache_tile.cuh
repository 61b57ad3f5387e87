// How 16 keys lie in shared memory, and copies to there of rows that are not 16 equally spaced ones of whole 16-byte
// chunks.
//
// A tile is [16 keys][padded_dim] of 16-bit elements, stored as padded_dim / 64 panels of 16 rows of 128 bytes. Within
// a row the 16-byte chunks are XORed with the row number, so that the eight rows of a matrix lie in different banks
// without padding (rows must not straddle 128-byte lines: that costs 6 % of bandwidth). Keys that take no part and dims
// past head_dim are filled with zeros; of them nothing is read but what shares 16 bytes with an unaligned row.
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

__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared(std::uint32_t address, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// If `issue`: copies 16 bytes asynchronously, of which the first `valid` come from `source`, the rest are zeros.
// Without a branch, across which no other instruction could move.
__device__ __forceinline__ void copy_async_if(bool issue, std::uint32_t destination, const void* source, int valid) {
  asm volatile(
      "{ .reg .pred issue; setp.ne.s32 issue, %3, 0; @issue cp.async.cg.shared.global [%0], [%1], 16, %2; }" ::"r"(
          destination),
      "l"(source), "r"(valid), "r"(static_cast<int>(issue))
      : "memory");
}
__device__ __forceinline__ void copy_async(std::uint32_t destination, const void* source, int valid) {
  copy_async_if(true, destination, source, valid);
}
// The same of all 16 bytes, or of none where `any` is 0. One instruction with a condition: a size would take registers.
__device__ __forceinline__ void copy_async_whole(bool issue, std::uint32_t destination, const void* source,
                                                 unsigned any) {
  asm volatile(
      "{ .reg .pred issue, any; .reg .u32 valid; setp.ne.s32 issue, %3, 0; setp.ne.u32 any, %2, 0;"
      " selp.u32 valid, 16, 0, any; @issue cp.async.cg.shared.global [%0], [%1], 16, valid; }" ::"r"(destination),
      "l"(source), "r"(any), "r"(static_cast<int>(issue))
      : "memory");
}

// Where a lane's pieces of 16 bytes lie when a warp goes over a tile: `rounds` times rows_at_once rows.
template <int padded_dim>
struct TileRounds {
  static constexpr int row_chunks = padded_dim / 8;
  static constexpr int rows_at_once = 32 / row_chunks;
  static constexpr int rounds = step_keys / rows_at_once;
  static __device__ __forceinline__ int row(int round) {
    return round * rows_at_once + static_cast<int>(threadIdx.x % 32) / row_chunks;
  }
  static __device__ __forceinline__ int chunk() { return static_cast<int>(threadIdx.x) % row_chunks; }
};

// Bytes to copy of a piece where `left` are left from its begin on.
__device__ __forceinline__ int clamp_to_piece(int left) {
  return max(0, min(16, left));
}

// Copies of 16 rows that lie anywhere: lane l knows the begin of row l % 16, as an address; 0: nothing to read. Out of
// line and with plain arguments, so that the fast path stays small and in registers.
//
// Asynchronously, by aligned pieces of 16 bytes. What is copied of a row begins with the piece that its first element
// lies in, up to 14 bytes early; align_rows() mends that. whole: rows begin and end with pieces.
template <int padded_dim, bool whole>
__device__ __noinline__ void copy_rows(unsigned char* tile, std::uint64_t own_row, int row_bytes) {
  using Rounds = TileRounds<padded_dim>;
  const std::uint32_t address = shared_address(tile);
  const int byte = Rounds::chunk() * 16;
  const std::uint64_t own_piece = own_row / 16 * 16;
  const int own_bytes = own_row == 0 ? 0 : row_bytes + static_cast<int>(own_row - own_piece); // from there
#pragma unroll
  for (int round = 0; round < Rounds::rounds; ++round) {
    const int row = Rounds::row(round);
    const std::uint64_t piece = __shfl_sync(0xffffffffu, own_piece, row) + byte;
    const int left = __shfl_sync(0xffffffffu, own_bytes, row) - byte;
    // Where nothing is valid nothing is read, so the address does not matter.
    copy_async(address + CacheTile<padded_dim>::chunk_offset(row, byte / 16), reinterpret_cast<const void*>(piece),
               whole ? (left > 0 ? 16 : 0) : clamp_to_piece(left));
  }
}

// Bytes `first` .. first + 15 of the 32 of two pieces; first: even, 0 .. 14.
__device__ __forceinline__ uint4 bytes_from(const uint4& low, const uint4& high, int first) {
  const std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  std::uint32_t from_eight[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    from_eight[i] = (first & 8) == 0 ? words[i] : words[i + 2];
  }
  std::uint32_t from_four[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    from_four[i] = (first & 4) == 0 ? from_eight[i] : from_eight[i + 1];
  }
  const int bits = (first & 2) * 8;
  return make_uint4(
      __funnelshift_r(from_four[0], from_four[1], bits), __funnelshift_r(from_four[1], from_four[2], bits),
      __funnelshift_r(from_four[2], from_four[3], bits), __funnelshift_r(from_four[3], from_four[4], bits));
}

// Moves every row to its place that was copied early: by own_early bytes that of row lane % 16. For one warp, after its
// copies have arrived.
template <int padded_dim>
__device__ __noinline__ void align_rows(unsigned char* tile, int own_early) {
  using Rounds = TileRounds<padded_dim>;
  using Tile = CacheTile<padded_dim>;
  constexpr int batch = 4; // rounds, so that what is in hand fits into registers
  const std::uint32_t address = shared_address(tile);
  const int chunk = Rounds::chunk();
#pragma unroll 1
  for (int first = 0; first < Rounds::rounds; first += batch) {
    uint4 moved[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int row = Rounds::row(first + i);
      const uint4 low = load_shared(address + Tile::chunk_offset(row, chunk));
      uint4 high = make_uint4(0, 0, 0, 0);
      if (chunk + 1 < Rounds::row_chunks) {
        high = load_shared(address + Tile::chunk_offset(row, chunk + 1));
      }
      moved[i] = bytes_from(low, high, __shfl_sync(0xffffffffu, own_early, row));
    }
    __syncwarp(); // these rows have been read
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      store_shared(address + Tile::chunk_offset(Rounds::row(first + i), chunk), moved[i]);
    }
  }
  __syncwarp();
}

// The piece at `piece`, as far as it is of the row [begin, end), where nothing else may be read.
__device__ __forceinline__ uint4 load_elements(std::uint64_t piece, std::uint64_t begin, std::uint64_t end) {
  std::uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t element = piece + 2 * i;
    if (element >= begin && element < end) {
      words[i / 2] |= static_cast<std::uint32_t>(__ldg(reinterpret_cast<const Element*>(element))) << i % 2 * 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The aligned piece at `piece`, as far as it is of the row [begin, end); what else is in it may be anything. Bytes from
// memory_end on are not read.
__device__ __forceinline__ uint4 load_piece(std::uint64_t piece, std::uint64_t begin, std::uint64_t end,
                                            std::uint64_t memory_end) {
  if (piece + 16 <= begin || piece >= end) {
    return make_uint4(0, 0, 0, 0);
  }
  return piece + 16 <= memory_end ? __ldg(reinterpret_cast<const uint4*>(piece)) : load_elements(piece, begin, end);
}

// Through registers to where they belong, and done when it returns: for rows that leave no room for being early, and
// for the last ones before the end of the caller's memory, after which not even a part of a piece may be asked for.
template <int padded_dim>
__device__ __noinline__ void copy_rows_now(unsigned char* tile, std::uint64_t own_row, int row_bytes,
                                           std::uint64_t memory_end) {
  using Rounds = TileRounds<padded_dim>;
  constexpr int batch = Rounds::rounds < 8 ? Rounds::rounds : 8; // rounds whose reads are under way together
  const std::uint32_t address = shared_address(tile);
  const int byte = Rounds::chunk() * 16;
  // Of this lane's words, the bits that a row has.
  std::uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = row_bytes - byte - i * 4;
    bits[i] = left >= 4 ? 0xffffffffu : left == 2 ? 0xffffu : 0u;
  }
#pragma unroll 1
  for (int first = 0; first < Rounds::rounds; first += batch) {
    uint4 low[batch], high[batch];
    int early[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const std::uint64_t begin = __shfl_sync(0xffffffffu, own_row, Rounds::row(first + i));
      const std::uint64_t end = begin == 0 ? 0 : begin + row_bytes;
      early[i] = static_cast<int>(begin % 16);
      low[i] = load_piece(begin - early[i] + byte, begin, end, memory_end);
      high[i] = load_piece(begin - early[i] + byte + 16, begin, end, memory_end);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const uint4 x = bytes_from(low[i], high[i], early[i]);
      store_shared(address + CacheTile<padded_dim>::chunk_offset(Rounds::row(first + i), byte / 16),
                   make_uint4(x.x & bits[0], x.y & bits[1], x.z & bits[2], x.w & bits[3]));
    }
  }
}

} // namespace single_query
