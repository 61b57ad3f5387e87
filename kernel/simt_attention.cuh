// The SIMT kernel body: float32, every head_dim, stride and alignment.
//
// `lanes` lanes share a key: each holds `vectors` groups of four head dims of it. A warp takes 32 / lanes keys at a
// time and `rows` such rows a step, straight into registers: all loads of a step are issued before its arithmetic, keys
// of the next step while this one's softmax runs. Each group of lanes keeps a softmax state of its own until the end.
#pragma once

#include "simt_steps.cuh"

namespace single_query {

// path: row or walk, both without pages here, or general. grid and pieces: see split_plan.h. Dynamic shared memory: the
// warps' staging, then the cluster's mailbox.
template <class Shape, Path path>
__global__ void __launch_bounds__(256, path == Path::general ? 1 : Shape::plain_blocks)
    simt_attention(const __grid_constant__ KernelArguments args) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_arguments(fetch_arguments(args));
  const AttentionProblem& problem = args.problem;
  const int head_dim = static_cast<int>(problem.head_dim);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warps = args.plan.warps;
  const int cluster_size = args.plan.cluster_size;
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  constexpr bool plain = path != Path::general; // a contiguous cache, rows aligned to 16 bytes, no modifiers
  const bool modified = !plain && args.modified;
  Pieces<path> pieces(args);
  keep_in_memory<path>(pieces);
  const std::uint32_t first_key = (rank * warps + warp) * Shape::step_keys;
  const std::uint32_t stride = cluster_size * warps * Shape::step_keys;
  const WarpStates states{reinterpret_cast<float*>(shared), Shape::staging_bytes / 4, Shape::tile_heads,
                          Shape::head_shift, 0};
  unsigned char* const mailbox = shared + warps * Shape::staging_bytes;
  const bool key_vectors = plain || args.key_copy_bytes == 16;
  const bool value_vectors = plain || args.value_copy_bytes == 16;
  Piece piece;
  for (bool first = true; pieces.next(piece); first = false) { // by row there is one piece, or none in a whole cluster
    if (!first) {
      __syncthreads(); // staging is free again
    }
    Heads heads = heads_of(args, piece.row_in_batch);
    std::uint32_t key = piece.keys.begin + first_key;
    const std::uint32_t keys_end = piece.keys.end;
    SimtReader<Shape> key_reader(keys_of(args), args.key_step, key_vectors, piece, heads.kv_head,
                                 key + lane / Shape::lanes);
    SimtReader<Shape> value_reader(values_of(args), args.value_step, value_vectors, piece, heads.kv_head,
                                   key + lane / Shape::lanes);
    SimtRows<Shape> keys, values;
    SimtRowFinder<Shape, plain> rows(problem, piece.batch, keys_end, key, stride);
    rows.find(key);
    key_reader.load(keys, rows, head_dim);
    // The query's dims have to be those of the keys.
    const auto load_query = [&](int head, int v) {
      const float* row = static_cast<const float*>(problem.query) + piece.batch * problem.query_stride_batch +
                         (heads.first_query_head + head) * problem.query_stride_head;
      return load_dims<Shape>(row, v, head < heads.count ? head_dim : 0, key_vectors,
                              plain || args.query_copy_bytes == 16);
    };
    float4 queries[Shape::tile_heads][Shape::vectors];
#pragma unroll
    for (int head = 0; head < Shape::tile_heads; ++head) {
#pragma unroll
      for (int v = 0; v < Shape::vectors; ++v) {
        queries[head][v] = load_query(head, v);
      }
    }
    value_reader.load(values, rows, head_dim);
    // This lane's query head: all of the key's lanes serve one head, or each head_lanes of them their own.
    const int own_head = min(lane % Shape::lanes / Shape::head_lanes, heads.count - 1);
    const std::int64_t own_query_head = heads.first_query_head + own_head;
    const ScoreModifiers modifiers{problem.scale, problem.softcap, alibi_slope(problem, piece.batch, own_query_head)};
#if __CUDA_ARCH__ >= 900
    if (cluster_size > 1) {
      open_mailbox(ClusterMailbox(mailbox, heads.count << Shape::head_shift, cluster_size), cluster_size);
    }
#endif
    keep_in_memory<path>(piece);
    keep_in_memory<path>(heads);
    SimtState<Shape> state;
    state.clear();
    bool staged = false; // the states of earlier steps
    int chain_steps = 0;
    bool more = true;
#pragma unroll 1
    do {
      float scores[Shape::rows]; // of this lane's head
      unsigned excluded = 0;     // a bit per row
      multiply_keys<Shape>(keys, queries, scores);
#pragma unroll
      for (int r = 0; r < Shape::rows; ++r) {
        const std::uint32_t row_key = key + rows.key_of(r);
        const bool in_range = row_key < keys_end;
        if (modified) {
          const float mask = in_range ? mask_value(problem, piece.batch, own_query_head, row_key) : 0.0f;
          const float distance = static_cast<float>(static_cast<int>(row_key - (piece.length - 1)));
          scores[r] = modified_score(modifiers, scores[r], distance, mask);
          excluded |= mask == negative_infinity ? 1u << r : 0u;
        } else {
          scores[r] *= problem.scale;
        }
        scores[r] = !in_range || (excluded >> r & 1) ? negative_infinity
                    : rows.missing >> r & 1          ? __int_as_float(0x7fffffff)
                                                     : scores[r];
      }
      key += stride;
      more = key < keys_end;
      if (more) {
        rows.find(key);
        key_reader.load(keys, rows, head_dim);
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
              state.add(head, v, w, values[r][v]);
            }
          }
        }
      }
      if (++chain_steps == Shape::chain_steps || !more) {
        chain_steps = 0;
        state.merge_groups();
        if (staged) {
          state.add_to_staged(states, warp, lane, value_vectors);
        } else {
          state.stage(states, warp, lane, value_vectors);
        }
        staged = true;
      }
      if (more) { // not sooner: the registers are the chain's end's
        value_reader.load(values, rows, head_dim);
      }
    } while (more);
    finish_piece<true>(args, {piece, heads, piece.whole ? Cut{} : pieces.cut(piece), states, mailbox});
  }
}

} // namespace single_query
