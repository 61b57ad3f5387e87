// The SIMT kernel body: float32, every head_dim, stride and alignment.
//
// `lanes` lanes share a key: each holds `vectors` groups of four head dims of it. A warp takes 32 / lanes keys at a
// time and `rows` such rows a step, straight into registers: all loads of a step are issued before its arithmetic, keys
// of the next step while this one's softmax runs. Each group of lanes keeps a softmax state of its own until the end.
#pragma once

#include "mask.h"
#include "merge_partials.cuh"
#include "score.h"

namespace single_query {

template <int lanes_, int vectors_, int tile_heads_>
struct SimtShape {
  static constexpr int lanes = lanes_;           // of one key
  static constexpr int vectors = vectors_;       // of four dims a lane
  static constexpr int tile_heads = tile_heads_; // query heads: 1 or 8
  static constexpr int padded_dim = 4 * lanes * vectors;
  static constexpr int rows = vectors >= 4 ? 2 : 4; // keys of one lane in a step
  static constexpr int keys_at_once = 32 / lanes;
  static constexpr int step_keys = rows * keys_at_once;
  static constexpr int head_lanes = lanes / tile_heads; // lanes that hold the scores of one head
  static constexpr int head_shift = padded_dim == 32 ? 3 : padded_dim == 64 ? 4 : padded_dim == 128 ? 5 : 6;
  static constexpr int staging_bytes = WarpStates::floats(tile_heads, head_shift) * static_cast<int>(sizeof(float));

  static constexpr int shared_bytes(const SplitPlan& plan) {
    const int mailbox =
        plan.cluster_size > 1 ? ClusterMailbox::bytes(tile_heads << head_shift, plan.cluster_size, plan.warps) : 0;
    return plan.warps * staging_bytes + mailbox;
  }
};

// Four elements of a row, the first of which is its `dim`, one by one; zeros past head_dim.
__device__ __forceinline__ float4 load_singly(const float* from, int dim, int head_dim) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = dim + i < head_dim ? __ldg(from + i) : 0.0f;
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ float4 load_vector(const float* from, int dim, int head_dim) {
  return dim < head_dim ? __ldg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
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

  // The groups of lanes of a warp become one state, in every group.
  __device__ __forceinline__ void merge_groups() {
#pragma unroll
    for (int offset = Shape::lanes; offset < 32; offset *= 2) {
      raise_max(fmaxf(max_score, __shfl_xor_sync(0xffffffffu, max_score, offset)));
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
};

// One lane's part of a step's rows of one cache.
template <class Shape>
using SimtRows = float4[Shape::rows][Shape::vectors];

// Which of this lane's rows of a step can be read (a bit per row), with a page table where they lie, and which need a
// page that does not exist.
template <class Shape, bool plain>
__device__ __forceinline__ unsigned find_rows(const AttentionProblem& problem, const Piece& piece,
                                              std::uint32_t first_key, KeySlot (&slots)[Shape::rows],
                                              unsigned& missing) {
  unsigned readable = 0;
  missing = 0;
#pragma unroll
  for (int r = 0; r < Shape::rows; ++r) {
    const std::uint32_t key = first_key + r * Shape::keys_at_once + threadIdx.x % 32 / Shape::lanes;
    if (key < piece.keys.end) {
      readable |= 1u << r;
      if (!plain && problem.page_table != nullptr) {
        slots[r] = key_slot(problem, piece.batch, key);
        if (!page_exists(problem, slots[r].page)) {
          readable &= ~(1u << r);
          missing |= 1u << r;
        }
      }
    }
  }
  return readable;
}

// Reads one of the two caches, this lane's part of a step at a time.
template <class Shape, bool plain>
class SimtReader {
public:
  // cache: the tensor; step: elements from one step of the warp to its next.
  __device__ __forceinline__ SimtReader(const AttentionProblem& problem, const void* cache, std::int64_t stride_page,
                                        std::int64_t stride_head, std::int64_t stride_slot, std::int64_t step,
                                        bool vectors, const Piece& piece, std::uint32_t kv_head,
                                        std::uint32_t first_key)
      : problem_(problem), head_(static_cast<const float*>(cache) + kv_head * stride_head + lane_dim()),
        row_(head_ + piece.batch * stride_page + static_cast<std::int64_t>(first_key) * stride_slot),
        stride_page_(stride_page), stride_slot_(stride_slot), step_(step), vectors_(plain || vectors) {}

  // slots: with a page table, where the step's rows are; readable: a bit per row. Advances to the next step.
  __device__ __forceinline__ void load(SimtRows<Shape>& rows, const KeySlot (&slots)[Shape::rows], unsigned readable) {
    const bool paged = !plain && problem_.page_table != nullptr;
    const float* row = row_;
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) {
      const int limit = readable >> r & 1 ? static_cast<int>(problem_.head_dim) : 0;
      if (paged) {
        row = head_ + slots[r].page * stride_page_ + slots[r].slot * stride_slot_;
      }
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        constexpr int apart = Shape::lanes * 4;
        rows[r][v] = vectors_ ? load_vector(row + v * apart, lane_dim() + v * apart, limit)
                              : load_singly(row + v * apart, lane_dim() + v * apart, limit);
      }
      row += Shape::keys_at_once * stride_slot_;
    }
    row_ += step_;
  }

private:
  static __device__ __forceinline__ int lane_dim() {
    return static_cast<int>(threadIdx.x) % Shape::lanes * 4;
  }

  const AttentionProblem& problem_;
  const float* head_; // row 0 of page 0, this lane's dims
  const float* row_;  // the coming step's first row, in a contiguous cache
  std::int64_t stride_page_, stride_slot_, step_;
  bool vectors_;
};

// grid and pieces: see split_plan.h. Dynamic shared memory: the warps' staging, then the cluster's mailbox.
template <class Shape, Path path>
__global__ void __launch_bounds__(256, 2) simt_attention(const __grid_constant__ KernelArguments args) {
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionProblem& problem = args.problem;
  const int head_dim = static_cast<int>(problem.head_dim);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warps = args.plan.warps;
  const int cluster_size = args.plan.cluster_size;
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  constexpr bool plain = path == Path::plain;
  const bool modified = !plain && args.modified;
  Pieces<path> pieces(args);
  const std::uint32_t first_key = (rank * warps + warp) * Shape::step_keys;
  const std::uint32_t stride = cluster_size * warps * Shape::step_keys;
  const WarpStates states{reinterpret_cast<float*>(shared), Shape::staging_bytes / 4, Shape::tile_heads,
                          Shape::head_shift};
  unsigned char* const mailbox = shared + warps * Shape::staging_bytes;
  Piece piece;
  for (bool first = true; pieces.next(piece); first = false) { // by row there is one piece, or none in a whole cluster
    if (!first) {
      __syncthreads(); // staging is free again
    }
    const Heads heads = heads_of(args, piece.row_in_batch);
    std::uint32_t key = piece.keys.begin + first_key;
    SimtReader<Shape, plain> key_reader(problem, problem.key, problem.key_stride_page, problem.key_stride_head,
                                        problem.key_stride_slot, args.key_step, args.key_copy_bytes == 16, piece,
                                        heads.kv_head, key + lane / Shape::lanes);
    SimtReader<Shape, plain> value_reader(problem, problem.value, problem.value_stride_page, problem.value_stride_head,
                                          problem.value_stride_slot, args.value_step, args.value_copy_bytes == 16,
                                          piece, heads.kv_head, key + lane / Shape::lanes);
    SimtRows<Shape> keys, values;
    KeySlot slots[Shape::rows];
    unsigned missing = 0; // a bit per row of the step: needed a page that does not exist
    unsigned readable = find_rows<Shape, plain>(problem, piece, key, slots, missing);
    key_reader.load(keys, slots, readable);
    float4 queries[Shape::tile_heads][Shape::vectors];
#pragma unroll
    for (int head = 0; head < Shape::tile_heads; ++head) {
      const float* row = static_cast<const float*>(problem.query) + piece.batch * problem.query_stride_batch +
                         (heads.first_query_head + head) * problem.query_stride_head;
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        const int dim = (v * Shape::lanes + lane % Shape::lanes) * 4;
        const int limit = head < heads.count ? head_dim : 0;
        queries[head][v] = plain || args.query_copy_bytes == 16 ? load_vector(row + dim, dim, limit)
                                                                : load_singly(row + dim, dim, limit);
      }
    }
    value_reader.load(values, slots, readable);
    // This lane's query head: all of the key's lanes serve one head, or each head_lanes of them their own.
    const int own_head = min(lane % Shape::lanes / Shape::head_lanes, heads.count - 1);
    const std::int64_t own_query_head = heads.first_query_head + own_head;
    const ScoreModifiers modifiers{problem.scale, problem.softcap, alibi_slope(problem, piece.batch, own_query_head)};
#if __CUDA_ARCH__ >= 900
    if (cluster_size > 1) {
      open_mailbox(ClusterMailbox(mailbox, heads.count << Shape::head_shift, cluster_size, warps), cluster_size);
    }
#endif
    SimtState<Shape> state;
    state.clear();
#pragma unroll 1
    for (; key < piece.keys.end; key += stride) {
      float scores[Shape::rows]; // of this lane's head
      unsigned excluded = 0;     // a bit per row
#pragma unroll
      for (int r = 0; r < Shape::rows; ++r) {
        const std::uint32_t row_key = key + r * Shape::keys_at_once + lane / Shape::lanes;
        const bool in_range = row_key < piece.keys.end;
        const float mask = modified && in_range ? mask_value(problem, piece.batch, own_query_head, row_key) : 0.0f;
        float partial[Shape::tile_heads];
#pragma unroll
        for (int head = 0; head < Shape::tile_heads; ++head) {
          partial[head] = 0;
#pragma unroll
          for (int v = 0; v < Shape::vectors; ++v) {
            partial[head] = dot(keys[r][v], queries[head][v], partial[head]);
          }
        }
        scores[r] = reduce_over_lanes<Shape>(partial);
        if (modified) {
          const float distance = static_cast<float>(static_cast<int>(row_key - (piece.length - 1)));
          scores[r] = modified_score(modifiers, scores[r], distance, mask);
          excluded |= mask == negative_infinity ? 1u << r : 0u;
        } else {
          scores[r] *= problem.scale;
        }
        scores[r] = !in_range || (excluded >> r & 1) ? negative_infinity
                    : missing >> r & 1               ? __int_as_float(0x7fffffff)
                                                     : scores[r];
      }
      const bool more = key + stride < piece.keys.end;
      if (more) {
        readable = find_rows<Shape, plain>(problem, piece, key + stride, slots, missing);
        key_reader.load(keys, slots, readable);
      }
      float largest = state.max_score;
#pragma unroll
      for (int r = 0; r < Shape::rows; ++r) {
        largest = fmaxf(largest, scores[r]);
      }
      if (__any_sync(0xffffffffu, largest > state.max_score)) {
        state.raise_max(largest);
      }
#pragma unroll
      for (int r = 0; r < Shape::rows; ++r) {
        const float weight = softmax_weight(scores[r], state.max_score);
        state.sum_exp += weight;
        const float scaled = weight * wide_value_scale;
        const unsigned excluded_lanes = modified ? __ballot_sync(0xffffffffu, excluded >> r & 1) : 0u;
#pragma unroll
        for (int head = 0; head < Shape::tile_heads; ++head) {
          const float w = of_head<Shape>(scaled, head);
          // A weight of 0 does not keep an excluded key's NaN out of a product.
          const int source = lane / Shape::lanes * Shape::lanes + head * Shape::head_lanes;
          if ((excluded_lanes >> source & 1) == 0) {
#pragma unroll
            for (int v = 0; v < Shape::vectors; ++v) {
              float4& o = state.output[head][v];
              const float4& x = values[r][v];
              o = make_float4(fmaf(w, x.x, o.x), fmaf(w, x.y, o.y), fmaf(w, x.z, o.z), fmaf(w, x.w, o.w));
            }
          }
        }
      }
      if (more) {
        value_reader.load(values, slots, readable);
      }
    }
    state.merge_groups();
    if (lane < Shape::lanes) {
      if (lane % Shape::head_lanes == 0) {
        states.state(warp, lane / Shape::head_lanes) = make_float2(state.max_score, state.sum_exp);
      }
#pragma unroll
      for (int head = 0; head < Shape::tile_heads; ++head) {
#pragma unroll
        for (int v = 0; v < Shape::vectors; ++v) {
          reinterpret_cast<float4*>(states.values(warp, head))[v * Shape::lanes + lane] = state.output[head][v];
        }
      }
    }
    finish_piece(args, {piece, heads, piece.whole ? Cut{} : pieces.cut(piece), states, mailbox});
  }
}

} // namespace single_query
