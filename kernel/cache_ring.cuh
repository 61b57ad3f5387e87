// The load path of the tensor-core body: each warp streams its own steps of 16 keys from the cache into a ring of
// stages in shared memory, far enough ahead that reads never stop; nobody waits for them but the warp itself, or the
// warps of its block where they form teams. A stage is a K tile and a V tile.
#pragma once

#include "cache_tile.cuh"
#include "work.cuh"

#include <cuda_pipeline_primitives.h>

namespace single_query {

// Steps begin at multiples of 16 keys whatever their piece begins with, so that the 16 keys of a step lie in one page
// whenever the page size is a multiple of 16: then, as in a contiguous cache, its rows are equally far apart.
__device__ __forceinline__ std::uint32_t first_step(KeyRange piece) {
  return piece.begin / step_keys * step_keys;
}

// Rows of 16-bit elements that do not begin at multiples of 16 bytes have to be mended after they are copied by pieces
// of 16, but rows that are 8 keys apart all begin equally far behind such a multiple. On Path::spread 8 warps share the
// keys of 8 steps in turn, each every 8th of them, and leave their tiles as they come: early by a few elements, which
// are somebody else's. The query has as many zeros in front, and of the output as many dims are left out.
constexpr int most_early = 7; // elements

template <Path path>
constexpr int spread_shift = path == Path::spread ? 3 : 0; // log2 of the keys from one row of a tile to the next

template <Path path>
constexpr std::uint32_t tile_keys = 1 + ((step_keys - 1) << spread_shift<path>); // from a tile's first to its last

// First key of a warp, of those that go through a piece together, relative to the piece's first step.
template <Path path>
__device__ __forceinline__ std::uint32_t first_key_of(int warp) {
  return path == Path::spread ? warp / 8 * (8 * step_keys) + warp % 8 : warp * step_keys;
}

// Elements by which tiles begin early whose first row is that of `key`.
template <Path path>
__device__ __forceinline__ int early_elements(const Cache& cache, std::uint32_t batch, std::uint32_t kv_head,
                                              std::uint32_t key) {
  const std::uint64_t row = reinterpret_cast<std::uint64_t>(cache.data) / sizeof(Element) + batch * cache.stride_page +
                            kv_head * cache.stride_head + key * cache.stride_slot;
  return path == Path::spread ? static_cast<int>(row % 8) : 0;
}

// A bit for each of the 16 rows of every stage.
class StageRows {
public:
  __device__ __forceinline__ void set(int stage, unsigned rows) {
    bits_ = (bits_ & ~(0xffffull << step_keys * stage)) | static_cast<std::uint64_t>(rows) << step_keys * stage;
  }
  __device__ __forceinline__ unsigned of(int stage) const {
    return static_cast<unsigned>(bits_ >> step_keys * stage) & 0xffffu;
  }

private:
  std::uint64_t bits_ = 0;
};

template <int padded_dim>
struct CacheRing {
  using Tile = CacheTile<padded_dim>;
  static constexpr int stages = padded_dim >= 128 ? 2 : 4;
  static constexpr int warp_bytes = stages * 2 * Tile::bytes;
  static constexpr int in_flight = 2 * stages - 1; // copy groups that may be pending when the oldest tile is needed
  static_assert(stages <= 4, "StageRows holds no more");

  static constexpr __device__ __forceinline__ int key_tile(int stage) { return stage * 2 * Tile::bytes; }
  static constexpr __device__ __forceinline__ int value_tile(int stage) { return key_tile(stage) + Tile::bytes; }
};

// One warp's reads of the cache, step by step over the pieces of its block, some stages ahead of the arithmetic.
// Sequence per step: copy_keys(stage), copy_values(stage), advance(). fill: tiles without keys are zeros, for readers
// that multiply tiles without asking which of them have keys: whatever else lies there, a weight of 0 does not keep
// out.
template <int padded_dim, Path path, bool fill>
class CacheReader {
  static constexpr bool general = path == Path::general;
  static constexpr bool spread = path == Path::spread;
  using Ring = CacheRing<padded_dim>;
  using Rounds = TileRounds<padded_dim>;
  static constexpr int row_lanes = Rounds::row_chunks; // lanes that share a row
  static constexpr int rows_at_once = Rounds::rows_at_once;

public:
  // first_key: of the warps that go through the steps together, relative to a piece's first step; lead: this warp's
  // first key relative to that; stride: keys that all warps take in a step. A warp also goes through the steps that
  // have no keys for it but for others of those warps.
  __device__ __forceinline__ CacheReader(const KernelArguments& args, unsigned char* ring, const Pieces<path>& pieces,
                                         std::uint32_t first_key, std::uint32_t lead, std::uint32_t stride)
      : args_(args), ring_(ring), pieces_(pieces), first_key_(first_key), lead_(lead), stride_(stride) {
    address_ = shared_address(ring);
    lane_offset_ = Ring::Tile::chunk_offset(lane() / row_lanes, lane() % row_lanes);
    lane_bytes_ = lane() % row_lanes * 8 < args.problem.head_dim ? 16 : 0;
    next_piece();
  }

  __device__ __forceinline__ void copy_keys(int stage) {
    spaced_ = true;
    rows_ = key_ < keys_.end ? rows_before(keys_.end) & ~rows_before(max(keys_.begin, key_)) : 0;
    if (paged()) {
      find_pages(stage);
    }
    copy_tile(Ring::key_tile(stage), stage, keys_of(args_), key_side_);
  }

  __device__ __forceinline__ void copy_values(int stage) {
    copy_tile(Ring::value_tile(stage), stage, values_of(args_), value_side_);
  }

  __device__ __forceinline__ void advance() {
    key_ += stride_;
    if (key_ - lead_ >= keys_.end) {
      next_piece();
    } else if (paged()) {
      if (++step_ == steps_looked_up) {
        step_ = 0;
        slots_ = slots_ahead_;
        look_ahead();
      }
    } else {
      key_side_.row += args_.key_step;
      value_side_.row += args_.value_step;
    }
  }

  // Which of the keys in this stage need a page that does not exist: a bit for each.
  __device__ __forceinline__ unsigned missing(int stage) const {
    return may_have_pages<path> ? missing_.of(stage) : 0;
  }

  // Mends rows that were copied early, when their tile has arrived.
  __device__ __forceinline__ void align_keys(int stage) const {
    align_tile(Ring::key_tile(stage), stage, args_.key_copy_bytes, key_side_);
  }
  __device__ __forceinline__ void align_values(int stage) const {
    align_tile(Ring::value_tile(stage), stage, args_.value_copy_bytes, value_side_);
  }

private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

  // One of the two caches on its way into the ring.
  struct Side {
    // This lane's part of the first row it copies of a step, where rows are spaced: of the coming step, and of one that
    // begins page 0.
    const Element *row = nullptr, *first_row = nullptr;
    std::uint32_t early = 0;      // bytes that row lane % 16 was copied early by: eight bits for every stage
    int lane_bytes = 0;           // that this lane copies of a spread row
  };

  // Those of the coming step's rows that lie before key `end`, from key_ on: a bit for each.
  __device__ __forceinline__ unsigned rows_before(std::uint32_t end) const {
    constexpr std::uint32_t spacing = 1u << spread_shift<path>;
    const std::uint32_t count = (end - key_ + spacing - 1) / spacing;
    return (1u << min(count, static_cast<std::uint32_t>(step_keys))) - 1;
  }

  __device__ __forceinline__ void begin_piece(const Cache& cache, Side& side) const {
    side.first_row = static_cast<const Element*>(cache.data) + kv_head_ * cache.stride_head +
                     (lane() / row_lanes << spread_shift<path>) * cache.stride_slot + lane() % row_lanes * 8;
  }
  static __device__ __forceinline__ void point_at(const Cache& cache, Side& side, std::uint32_t page,
                                                  std::uint32_t slot) {
    side.row = side.first_row + page * cache.stride_page + slot * cache.stride_slot;
  }
  __device__ __forceinline__ void point_at(std::uint32_t page, std::uint32_t slot) {
    point_at(keys_of(args_), key_side_, page, slot);
    point_at(values_of(args_), value_side_, page, slot);
  }
  __device__ __forceinline__ void begin_early(const Cache& cache, Side& side) const {
    const int early = early_elements<path>(cache, batch_, kv_head_, key_);
    side.row -= early;
    side.lane_bytes = clamp_to_piece((early + static_cast<int>(args_.problem.head_dim)) * 2 - lane() % row_lanes * 16);
  }

  __device__ __forceinline__ void next_piece() {
    Piece piece;
    do {
      if (!pieces_.next(piece)) {
        key_ = lead_;
        keys_ = {0, 0}; // nothing is in range any more, see ended()
        return;
      }
      keys_ = piece.keys;
      key_ = first_step(piece.keys) + first_key_ + lead_;
    } while (key_ - lead_ >= keys_.end);
    batch_ = piece.batch;
    kv_head_ = heads_of(args_, piece.row_in_batch).kv_head;
    begin_piece(keys_of(args_), key_side_);
    begin_piece(values_of(args_), value_side_);
    if (paged()) {
      step_ = 0;
      slots_ = look_up(key_);
      look_ahead();
    } else {
      point_at(batch_, key_);
      if (spread) {
        begin_early(keys_of(args_), key_side_);
        begin_early(values_of(args_), value_side_);
      }
    }
  }

  // Whether no piece is left: steps that are still copied ahead of the arithmetic will not be taken.
  __device__ __forceinline__ bool ended() const { return keys_.end == 0; }

  __device__ __forceinline__ bool paged() const {
    return has_pages<path> || (may_have_pages<path> && args_.problem.page_table != nullptr);
  }

  // The page table is read by all lanes at once, for steps to come: where the keys of a step all lie in one page, for a
  // step a lane, else for a key a lane. Such a read is under way all that time before its result is needed.
  static constexpr int steps_looked_up = has_whole_pages<path> ? 32 : 32 / step_keys;
  __device__ __forceinline__ KeySlot look_up(std::uint32_t first_key) const {
    constexpr bool whole = has_whole_pages<path>;
    const std::uint32_t key =
        first_key + (whole ? lane() * stride_ : lane() / step_keys * stride_ + lane() % step_keys);
    // A whole step that begins before its piece lies in a page of the piece.
    return key < keys_.end && (whole || key >= keys_.begin) ? key_slot(args_.problem, batch_, key) : KeySlot{-1, 0};
  }
  __device__ __forceinline__ void look_ahead() {
    const std::uint32_t key = key_ + steps_looked_up * stride_;
    if (key < keys_.end) {
      slots_ahead_ = look_up(key);
    }
  }

  // Where the coming step's rows are.
  __device__ __forceinline__ void find_pages(int stage) {
    constexpr unsigned all = 0xffffffffu;
    if (has_whole_pages<path>) {
      const std::int32_t page = __shfl_sync(all, slots_.page, step_);
      point_at(page, __shfl_sync(all, slots_.slot, step_));
      const bool exists = page_exists(args_.problem, page);
      missing_.set(stage, exists ? 0 : rows_);
      rows_ = exists ? rows_ : 0;
      return;
    }
    const int own = lane() % step_keys;
    const int source = step_ * step_keys + own;
    slot_.page = __shfl_sync(all, slots_.page, source);
    slot_.slot = __shfl_sync(all, slots_.slot, source);
    const bool exists = page_exists(args_.problem, slot_.page);
    missing_.set(stage, __ballot_sync(all, !exists && is_in(keys_, key_ + own)) & 0xffffu);
    spaced_ = path == Path::general && args_.problem.page_size % step_keys == 0 && __all_sync(all, exists);
    if (spaced_) {
      point_at(slot_.page, slot_.slot - own);
    }
  }

  // Address of row lane % 16 of the coming step; 0: nothing to read.
  __device__ __forceinline__ std::uint64_t own_row(const Cache& cache) const {
    const std::uint32_t key = key_ + lane() % step_keys;
    if (!is_in(keys_, key) || (paged() && !page_exists(args_.problem, slot_.page))) {
      return 0;
    }
    const std::int64_t page = paged() ? slot_.page : batch_;
    const std::int64_t slot = paged() ? slot_.slot : key;
    return reinterpret_cast<std::uint64_t>(static_cast<const Element*>(cache.data) + kv_head_ * cache.stride_head +
                                           page * cache.stride_page + slot * cache.stride_slot);
  }

  // tile: its place in the ring.
  __device__ __forceinline__ void copy_tile(int tile, int stage, const Cache& cache, Side& side) const {
    const std::int64_t stride_slot = cache.stride_slot;
    const int copy_bytes = cache.copy_bytes;
    const Element* row = side.row;
    const int lane_bytes = spread ? side.lane_bytes : lane_bytes_;
    if (key_ >= keys_.end && (!fill || (spread && ended()))) {
      // The piece, or the last of all, has ended.
    } else if (spread && at_end(cache, row, lane_bytes)) {
      copy_last_rows(tile, cache, row, lane_bytes);
    } else if (spaced_ && (!general || copy_bytes == 16)) {
      const unsigned rows = lane_bytes > 0 ? rows_ >> lane() / row_lanes : 0; // this lane's
#pragma unroll
      for (int i = 0; i < Rounds::rounds; ++i) {
        // chunk_offset() of row i * rows_at_once + lane / row_lanes, from that of row lane / row_lanes. Not of the
        // whole address: in builds that ptxas does not optimise (-G), dynamic shared memory begins at any multiple
        // of 16.
        const std::uint32_t swizzled = lane_offset_ ^ (i * rows_at_once % 8 * 16);
        const std::uint32_t destination = address_ + tile + swizzled + i * rows_at_once * 128;
        const unsigned valid = rows & 1u << i * rows_at_once;
        if (spread) {
          copy_async_if(!ended(), destination, row, valid != 0 ? lane_bytes : 0);
        } else {
          copy_async_whole(!fill || !ended(), destination, row, valid);
        }
        row += rows_at_once * stride_slot << spread_shift<path>;
      }
    } else if (path == Path::any_pages || general) {
      const int row_bytes = static_cast<int>(args_.problem.head_dim) * 2;
      const std::uint64_t own = own_row(cache);
      if (!general || copy_bytes == 16) {
        copy_rows<padded_dim, true>(ring_ + tile, own, row_bytes);
      } else {
        const int early = static_cast<int>(own % 16);
        const auto last_row = reinterpret_cast<std::uint64_t>(cache.last_row);
        // Part of a piece is asked for by an address up to 14 bytes further on, with which the piece would end 28 bytes
        // after the row. Nothing is read there, but the tools that look after memory see the address.
        const bool now = __any_sync(0xffffffffu, early + row_bytes > padded_dim * 2 || own + 28 > last_row);
        if (now) {
          copy_rows_now<padded_dim>(ring_ + tile, own, row_bytes, last_row + row_bytes);
        } else {
          copy_rows<padded_dim, false>(ring_ + tile, own, row_bytes);
        }
        side.early = (side.early & ~(0xffu << 8 * stage)) | static_cast<unsigned>(now ? 0 : early) << 8 * stage;
      }
    }
    __pipeline_commit();
  }

  // Whether this lane may ask, as in copy_tile(), for part of a piece too near the end of the caller's memory.
  __device__ __forceinline__ bool too_near_end(const Cache& cache, const Element* piece, int lane_bytes) const {
    constexpr int reach = 15; // elements, from the piece's first on
    return lane_bytes % 16 != 0 && static_cast<const Element*>(cache.last_row) + args_.problem.head_dim - piece < reach;
  }
  // The same of any lane, in the last of a step's spread rows. row: this lane's part of the first one.
  __device__ __forceinline__ bool at_end(const Cache& cache, const Element* row, int lane_bytes) const {
    return __any_sync(0xffffffffu, too_near_end(cache, row + (tile_keys<path> - 1) * cache.stride_slot, lane_bytes));
  }

  // Spread rows, those parts of pieces by elements and at once.
  __device__ __forceinline__ void copy_last_rows(int tile, const Cache& cache, const Element* row,
                                                 int lane_bytes) const {
#pragma unroll 1
    for (int i = 0; i < Rounds::rounds; ++i) {
      const std::uint32_t destination = address_ + tile + Ring::Tile::chunk_offset(Rounds::row(i), Rounds::chunk());
      const bool valid = (rows_ >> Rounds::row(i) & 1) != 0;
      if (valid && too_near_end(cache, row, lane_bytes)) {
        const auto begin = reinterpret_cast<std::uint64_t>(row);
        store_shared(destination, load_elements(begin, begin, begin + lane_bytes));
      } else {
        copy_async(destination, row, valid ? lane_bytes : 0);
      }
      row += rows_at_once * cache.stride_slot << spread_shift<path>;
    }
  }

  __device__ __forceinline__ void align_tile(int tile, int stage, int copy_bytes, const Side& side) const {
    if (general && copy_bytes != 16) {
      const int early = static_cast<int>(side.early >> 8 * stage & 0xffu);
      if (__any_sync(0xffffffffu, early != 0)) {
        align_rows<padded_dim>(ring_ + tile, early);
      }
    }
  }

  const KernelArguments& args_;
  unsigned char* ring_;
  Pieces<path> pieces_;
  std::uint32_t first_key_, lead_, stride_;
  std::uint32_t address_;     // of the ring, in shared memory
  std::uint32_t lane_offset_; // of this lane's first chunk in a tile
  int lane_bytes_;            // that this lane copies of a row: none past head_dim
  // First key of the coming step, and keys of its piece.
  std::uint32_t key_ = 0;
  KeyRange keys_ = {0, 0};
  bool spaced_ = false; // the 16 rows of the step are equally far apart
  unsigned rows_ = 0;   // of the step, those that take part: a bit for each
  Side key_side_, value_side_;
  std::uint32_t batch_ = 0;
  std::uint32_t kv_head_ = 0;
  // With a page table: of key key_ + lane % 16; as look_up() gives them, and which of their steps is the coming one.
  KeySlot slot_ = {0, 0}, slots_ = {0, 0}, slots_ahead_ = {0, 0};
  int step_ = 0;
  StageRows missing_;
};

} // namespace single_query
