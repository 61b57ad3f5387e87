// The steps of the SIMT body: shapes, registers, loads, and how a warp's lanes share keys and heads.
#pragma once

#include "mask.h"
#include "merge_partials.cuh"
#include "score.h"

namespace single_query {

template <int lanes_, int vectors_, int tile_heads_>
struct SimtShape {
  static constexpr int lanes = lanes_;           // of one key
  static constexpr int vectors = vectors_;       // of four dims a lane
  static constexpr int tile_heads = tile_heads_; // query heads: 1, 4 or 8
  static constexpr int padded_dim = 4 * lanes * vectors;
  // Blocks that share a multiprocessor's registers; one of a general kernel has them for itself.
  static constexpr int plain_blocks = vectors * tile_heads > 8 ? 1 : 2;
  // Keys of one lane in a step: what the registers of keys and values hold, beside those of queries and output.
  static constexpr int most_rows = ((plain_blocks == 1 ? 208 : 96) - 8 * vectors * tile_heads) / (8 * vectors);
  static constexpr int rows = most_rows >= 8 ? 8 : most_rows >= 4 ? 4 : 2;
  static constexpr int keys_at_once = 32 / lanes;
  static constexpr int step_keys = rows * keys_at_once;
  static_assert(step_keys <= 32, "with a page table each lane looks up one of a step's keys");
  static constexpr int chain_steps = chain_length / rows;
  static constexpr int head_lanes = lanes / tile_heads; // lanes that hold the scores of one head
  static constexpr int head_shift = padded_dim == 32 ? 3 : padded_dim == 64 ? 4 : padded_dim == 128 ? 5 : 6;
  static constexpr int staging_bytes = WarpStates::floats(tile_heads, head_shift) * static_cast<int>(sizeof(float));

  static constexpr int shared_bytes(const SplitPlan& plan) {
    const int mailbox = plan.cluster_size > 1 ? ClusterMailbox::bytes(tile_heads << head_shift, plan.cluster_size) : 0;
    return plan.warps * staging_bytes + mailbox;
  }
};

// The four dims of vector v that are this lane's. Where rows are aligned to 16 bytes (`vectors`) they are neighbours
// and come in one load; else they lie `lanes` apart, so that the lanes of a key read neighbouring elements.
template <class Shape>
__device__ __forceinline__ int lane_dim(int v, int i, bool vectors) {
  const int lane = static_cast<int>(threadIdx.x % Shape::lanes);
  return vectors ? (v * Shape::lanes + lane) * 4 + i : (v * 4 + i) * Shape::lanes + lane;
}

// Those of a row, zeros from `limit` on. aligned: the row is, to 16 bytes.
template <class Shape>
__device__ __forceinline__ float4 load_dims(const float* row, int v, int limit, bool vectors, bool aligned) {
  if (vectors && aligned) {
    const int dim = lane_dim<Shape>(v, 0, true);
    return dim < limit ? __ldg(reinterpret_cast<const float4*>(row + dim)) : make_float4(0, 0, 0, 0);
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int dim = lane_dim<Shape>(v, i, vectors);
    x[i] = dim < limit ? __ldg(row + dim) : 0.0f;
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// Sum each of `partial` over the lanes of a key. With several heads the sums end up spread out: this lane's head is
// lane % lanes / head_lanes.
template <class Shape>
__device__ __forceinline__ float reduce_over_lanes(float (&partial)[Shape::tile_heads]) {
  int offset = Shape::lanes / 2;
#pragma unroll
  for (int count = Shape::tile_heads / 2; count > 0; count /= 2, offset /= 2) {
    const bool upper = (threadIdx.x & offset) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float sent = upper ? partial[i] : partial[i + count];
      const float kept = upper ? partial[i + count] : partial[i];
      partial[i] = kept + __shfl_xor_sync(0xffffffffu, sent, offset);
    }
  }
#pragma unroll
  for (; offset > 0; offset /= 2) {
    partial[0] += __shfl_xor_sync(0xffffffffu, partial[0], offset);
  }
  return partial[0];
}

// The number that the lanes of `head` hold, in all lanes of the key.
template <class Shape>
__device__ __forceinline__ float of_head(float x, int head) {
  if constexpr (Shape::tile_heads == 1) {
    return x;
  } else {
    return __shfl_sync(0xffffffffu, x, head * Shape::head_lanes, Shape::lanes);
  }
}

template <class Shape>
struct SimtState {
  float max_score; // of this lane's head
  float sum_exp;
  float4 output[Shape::tile_heads][Shape::vectors];

  __device__ __forceinline__ void clear() {
    max_score = negative_infinity;
    clear_sums();
  }

  __device__ __forceinline__ void clear_sums() {
    sum_exp = 0;
#pragma unroll
    for (int head = 0; head < Shape::tile_heads; ++head) {
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        output[head][v] = make_float4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void raise_max(float new_max) {
    const float factor = softmax_weight(max_score, new_max);
    max_score = new_max;
    sum_exp *= factor;
#pragma unroll
    for (int head = 0; head < Shape::tile_heads; ++head) {
      const float f = of_head<Shape>(factor, head);
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        float4& o = output[head][v];
        o = make_float4(o.x * f, o.y * f, o.z * f, o.w * f);
      }
    }
  }

  __device__ __forceinline__ void add(int head, int v, float weight, const float4& value) {
    float4& o = output[head][v];
    o = make_float4(fmaf(weight, value.x, o.x), fmaf(weight, value.y, o.y), fmaf(weight, value.z, o.z),
                    fmaf(weight, value.w, o.w));
  }

  // The groups of lanes of a warp become one state, in every group.
  __device__ __forceinline__ void merge_groups() {
    float largest = max_score;
#pragma unroll
    for (int offset = Shape::lanes; offset < 32; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    raise_max(largest);
    sum_groups();
  }

  // The same where all groups have the same maximum.
  __device__ __forceinline__ void sum_groups() {
#pragma unroll
    for (int offset = Shape::lanes; offset < 32; offset *= 2) {
      sum_exp += __shfl_xor_sync(0xffffffffu, sum_exp, offset);
#pragma unroll
      for (int head = 0; head < Shape::tile_heads; ++head) {
#pragma unroll
        for (int v = 0; v < Shape::vectors; ++v) {
          float4& o = output[head][v];
          o.x += __shfl_xor_sync(0xffffffffu, o.x, offset);
          o.y += __shfl_xor_sync(0xffffffffu, o.y, offset);
          o.z += __shfl_xor_sync(0xffffffffu, o.z, offset);
          o.w += __shfl_xor_sync(0xffffffffu, o.w, offset);
        }
      }
    }
  }

  // Leave the warp's state in shared memory, in the first group of lanes; after merge_groups(). Then go on from zero,
  // and the same maximum. vectors: see lane_dim(), of the values.
  __device__ __forceinline__ void stage(const WarpStates& states, int warp, int lane, bool vectors) {
    if (lane < Shape::lanes) {
      if (lane % Shape::head_lanes == 0) {
        states.state(warp, lane / Shape::head_lanes) = make_float2(max_score, sum_exp);
      }
#pragma unroll
      for (int head = 0; head < Shape::tile_heads; ++head) {
#pragma unroll
        for (int v = 0; v < Shape::vectors; ++v) {
          store_staged(states.values(warp, head), v, vectors, output[head][v]);
        }
      }
    }
    clear_sums();
  }

  // The same where states of earlier steps have been left: add to them. Goes on from what that rounds off.
  __device__ __forceinline__ void add_to_staged(const WarpStates& states, int warp, int lane, bool vectors) {
    __syncwarp(); // what other lanes have left is there
    float2& staged = states.state(warp, lane % Shape::lanes / Shape::head_lanes);
    const float2 before = staged;
    const float factor = softmax_weight(before.x, max_score);
    __syncwarp(); // all lanes have read
    const float total = add_chain(before.y * factor, sum_exp);
    if (lane < Shape::lanes && lane % Shape::head_lanes == 0) {
      staged = make_float2(max_score, total);
    }
#pragma unroll
    for (int head = 0; head < Shape::tile_heads; ++head) {
      const float f = of_head<Shape>(factor, head);
      if (lane < Shape::lanes) {
        float* const values = states.values(warp, head);
#pragma unroll
        for (int v = 0; v < Shape::vectors; ++v) {
          const float4 sum = load_staged(values, v, vectors);
          float4& o = output[head][v];
          store_staged(values, v, vectors,
                       make_float4(add_chain(sum.x * f, o.x), add_chain(sum.y * f, o.y), add_chain(sum.z * f, o.z),
                                   add_chain(sum.w * f, o.w)));
        }
      }
    }
    if (lane >= Shape::lanes) {
      clear_sums(); // the first group keeps the rest
    }
  }

private:
  static __device__ __forceinline__ float4 load_staged(const float* values, int v, bool vectors) {
    if (vectors) {
      return *reinterpret_cast<const float4*>(values + lane_dim<Shape>(v, 0, true));
    }
    return make_float4(values[lane_dim<Shape>(v, 0, false)], values[lane_dim<Shape>(v, 1, false)],
                       values[lane_dim<Shape>(v, 2, false)], values[lane_dim<Shape>(v, 3, false)]);
  }

  static __device__ __forceinline__ void store_staged(float* values, int v, bool vectors, const float4& x) {
    if (vectors) {
      *reinterpret_cast<float4*>(values + lane_dim<Shape>(v, 0, true)) = x;
    } else {
      values[lane_dim<Shape>(v, 0, false)] = x.x;
      values[lane_dim<Shape>(v, 1, false)] = x.y;
      values[lane_dim<Shape>(v, 2, false)] = x.z;
      values[lane_dim<Shape>(v, 3, false)] = x.w;
    }
  }
};

// One lane's part of a step's rows of one cache.
template <class Shape>
using SimtRows = float4[Shape::rows][Shape::vectors];

// Dot products of a step's rows with the query of this lane's head.
template <class Shape>
__device__ __forceinline__ void multiply_keys(const SimtRows<Shape>& keys,
                                              const float4 (&queries)[Shape::tile_heads][Shape::vectors],
                                              float (&scores)[Shape::rows]) {
#pragma unroll
  for (int r = 0; r < Shape::rows; ++r) {
    float partial[Shape::tile_heads] = {};
#pragma unroll
    for (int head = 0; head < Shape::tile_heads; ++head) {
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        partial[head] = dot(keys[r][v], queries[head][v], partial[head]);
      }
    }
    scores[r] = reduce_over_lanes<Shape>(partial);
  }
}

// Finds a warp's rows, step by step. plain: a contiguous cache of rows that are aligned to 16 bytes.
template <class Shape, bool plain>
class SimtRowFinder {
public:
  unsigned readable = 0; // of this lane's rows of the step, a bit per row
  unsigned missing = 0;  // those that need a page that does not exist

  // keys_end: of the piece; first_key: of the warp's first step; stride: keys from one step to the next.
  __device__ __forceinline__ SimtRowFinder(const AttentionProblem& problem, std::uint32_t batch, std::uint32_t keys_end,
                                           std::uint32_t first_key, std::uint32_t stride)
      : problem_(problem), batch_(batch), keys_end_(keys_end), stride_(stride) {
    if (paged()) {
      slot_ahead_ = look_up(first_key);
    }
  }

  // The steps in turn, each by its first key.
  __device__ __forceinline__ void find(std::uint32_t first_key) {
    readable = missing = 0;
    unsigned lost = 0; // of the step's keys
    if (paged()) {
      slot_ = slot_ahead_;
      slot_ahead_ = look_up(first_key + stride_);
      lost = ~__ballot_sync(0xffffffffu, page_exists(problem_, slot_.page));
    }
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) {
      if (first_key + key_of(r) < keys_end_) {
        readable |= 1u << r;
        missing |= (lost >> key_of(r) & 1) << r;
      }
    }
    readable &= ~missing;
  }

  // Key of this lane's row r, from the step's first one on.
  static __device__ __forceinline__ unsigned key_of(int r) {
    return r * Shape::keys_at_once + threadIdx.x % 32 / Shape::lanes;
  }

  __device__ __forceinline__ bool paged() const {
    return !plain && problem_.page_table != nullptr;
  }

  // With a page table, where row r lies. All lanes of the warp ask.
  __device__ __forceinline__ KeySlot slot(int r) const {
    return {__shfl_sync(0xffffffffu, slot_.page, key_of(r)), __shfl_sync(0xffffffffu, slot_.slot, key_of(r))};
  }

private:
  // Of key first_key + lane. Under way a step before its result is needed.
  __device__ __forceinline__ KeySlot look_up(std::uint32_t first_key) const {
    const std::uint32_t lane = threadIdx.x % 32;
    return lane < Shape::step_keys && first_key + lane < keys_end_ ? key_slot(problem_, batch_, first_key + lane)
                                                                   : KeySlot{-1, 0};
  }

  const AttentionProblem& problem_;
  std::uint32_t batch_, keys_end_, stride_;
  KeySlot slot_ = {-1, 0}, slot_ahead_ = {-1, 0}; // of one key a lane: of the step, of the next one
};

// Reads one of the two caches, this lane's part of a step at a time.
template <class Shape>
class SimtReader {
public:
  // step: elements from one step of the warp to its next; vectors: rows are aligned to 16 bytes.
  __device__ __forceinline__ SimtReader(const Cache& cache, std::int64_t step, bool vectors, const Piece& piece,
                                        std::uint32_t kv_head, std::uint32_t first_key)
      : head_(static_cast<const float*>(cache.data) + kv_head * cache.stride_head),
        row_(head_ + piece.batch * cache.stride_page + static_cast<std::int64_t>(first_key) * cache.stride_slot),
        stride_page_(cache.stride_page), stride_slot_(cache.stride_slot), step_(step), vectors_(vectors) {}

  // The coming step's rows, which `found` says where to find.
  template <bool plain>
  __device__ __forceinline__ void load(SimtRows<Shape>& rows, const SimtRowFinder<Shape, plain>& found, int head_dim) {
    if (plain || vectors_) {
      load_rows<true>(rows, found, head_dim);
    } else {
      load_rows<false>(rows, found, head_dim);
    }
    row_ += step_;
  }

private:
  template <bool vectors, bool plain>
  __device__ __forceinline__ void load_rows(SimtRows<Shape>& rows, const SimtRowFinder<Shape, plain>& found,
                                            int head_dim) const {
    const float* row = row_;
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) {
      if (found.paged()) {
        const KeySlot slot = found.slot(r);
        row = head_ + slot.page * stride_page_ + slot.slot * stride_slot_;
      }
      const int limit = found.readable >> r & 1 ? head_dim : 0;
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        rows[r][v] = load_dims<Shape>(row, v, limit, vectors, true);
      }
      row += Shape::keys_at_once * stride_slot_;
      asm volatile("" : "+l"(row)); // one after the other: the distances of all rows would take registers
    }
  }

  const float* head_; // row 0 of page 0
  const float* row_;  // the coming step's first row, in a contiguous cache
  std::int64_t stride_page_, stride_slot_, step_;
  bool vectors_;
};

// What is needed between pieces only, where there are several: the registers are the steps'.
template <Path path, class Bookkeeping>
__device__ __forceinline__ void keep_in_memory(Bookkeeping& state) {
  if constexpr (may_walk<path>) {
    asm volatile("" : : "l"(&state) : "memory");
  }
}

} // namespace single_query
