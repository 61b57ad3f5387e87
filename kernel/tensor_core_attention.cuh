// The tensor-core kernel body: float16 and bfloat16, every head_dim, stride and alignment. The type is a run-time
// value, since only the matrix instruction and the rounding of weights depend on it.
//
// Keys are the M = 16 side of mma.m16n8k16 and query heads the N = 8 side, so that a group of up to 8 heads per
// key/value head wastes nothing and every cache byte is read once:
//     scores [16 keys x 8 heads] = K tile [16 x D] . queries [D x 8]
//     output [D x 8 heads]      += V tile^T [D x 16] . weights [16 x 8]
// Each warp takes steps of 16 keys on its own: wait for its K tile, multiply, start the copy of a later K tile,
// softmax, wait for its V tile, multiply, start the copy of a later V tile. Warps meet only at the end of a piece.
//
// Groups of many heads would read the cache once for each tile of heads. There the warps of a block form teams, powers
// of two: each warp copies its own steps' keys as always, but then multiplies the tiles of the whole team with the
// heads of its own tile. All warps meet before and after that.
#pragma once

#include "tensor_core_modifiers.cuh"

namespace single_query {

// grid and pieces: see split_plan.h. Dynamic shared memory: the warps' rings, then staging (walk: the rings are busy
// with what comes next) or the cluster's mailbox.
template <class Shape, Path path>
__global__ void __launch_bounds__(256, 1) tensor_core_attention(const __grid_constant__ KernelArguments args) {
  using Ring = typename Shape::Ring;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t fetched = fetch_arguments(args);
  const AttentionProblem& problem = args.problem;
  const bool half = problem.dtype == DataType::float16;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warps = args.plan.warps;
  const int cluster_size = args.plan.cluster_size;
  const int rank = static_cast<int>(blockIdx.x) & (cluster_size - 1);
  const bool walk = walks<path>(args);
  const bool modified = path == Path::general && args.modified;
  Pieces<path> pieces(args);
  if (pieces.done()) {
    return; // the same for all blocks of a cluster
  }
  unsigned char* const ring = shared + warp * Ring::warp_bytes;
  unsigned char* const area = shared + warps * Ring::warp_bytes;
  const int team_shift = Shape::teams ? log2_floor(args.plan.team) : 0;
  const int team = 1 << team_shift;
  const int own_tile = warp & (team - 1);
  // Warps that go through the steps together begin with their first one's keys: with teams, all warps of the block.
  const int first_warp = team > 1 ? 0 : warp;
  const std::uint32_t first_key = first_key_of<path>(rank * warps + first_warp);
  const std::uint32_t team_key = (warp - own_tile - first_warp) * step_keys; // of the team, from there
  const auto meet = [team] {
    if (team > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  };
  const std::uint32_t stride = cluster_size * warps * step_keys;
  constexpr std::uint32_t reach = tile_keys<path>;
  // Tiles without keys are multiplied: the second of two that a team takes at once, and that of a warp whose every 8th
  // key is none of a short piece's.
  constexpr bool fill = Shape::tiles_at_once > 1 || path == Path::spread;
  CacheReader<Shape::padded_dim, path, fill> reader(args, ring, pieces, first_key, (warp - first_warp) * step_keys,
                                                    stride);
  __shared__ std::uint16_t missing_keys[Shape::teams ? Shape::most_warps : 1]; // of each warp's tile
  await_arguments(fetched);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const MatrixRows key_rows(lane % 16, lane / 16);
  const MatrixRows value_rows(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  TensorCoreState<Shape> state;
  LaneModifiers<Shape> modifiers;
  Piece piece;
  int stage = 0;
  for (bool first = true; pieces.next(piece); first = false) {
    const Heads heads = heads_of(args, piece.row_in_batch);
    if (first) {
      reader.copy_keys(0);
    } else {
      __syncthreads(); // staging is free again
    }
    const Heads own_heads = tile_of(heads, own_tile, Shape::tile_heads);
    const std::uint32_t begin = first_step(piece.keys) + first_key;
    const int key_early = early_elements<path>(keys_of(args), piece.batch, heads.kv_head, begin);
    const int value_early = early_elements<path>(values_of(args), piece.batch, heads.kv_head, begin);
    std::uint32_t queries[Shape::head_blocks][2 * Shape::dim_steps];
    load_queries<Shape, path>(args, piece, own_heads, key_early, queries);
    if (first) {
#pragma unroll 1
      for (int ahead = 0; ahead < Ring::stages; ++ahead) {
        if (ahead > 0) {
          reader.copy_keys(ahead);
        }
        reader.copy_values(ahead);
        reader.advance();
      }
#if __CUDA_ARCH__ >= 900
      if (cluster_size > 1) {
        open_mailbox(ClusterMailbox(area, heads.count << Shape::head_shift, cluster_size), cluster_size);
      }
#endif
    }
    state.clear();
    bool staged = false; // the output of earlier steps
    // By row, the warps' rings will have drained and hold their states; in a walk they hold the next piece's keys.
    const WarpStates states{reinterpret_cast<float*>(walk ? area : shared),
                            (walk ? Shape::staging_bytes : Ring::warp_bytes) / 4, Shape::tile_heads, Shape::head_shift,
                            team_shift};
    std::uint32_t key = begin;
    if (modified) {
      modifiers.begin_piece(problem, piece, own_heads);
      modifiers.load_mask(problem, piece, key);
    }
#pragma unroll 1
    for (; key < piece.keys.end; key += stride) {
      if (Shape::teams) {
        __pipeline_wait_prior(Ring::in_flight - 1); // the step's keys and values
        __syncwarp();
        reader.align_keys(stage);
        reader.align_values(stage);
        missing_keys[warp] = static_cast<std::uint16_t>(reader.missing(stage));
        meet();
      }
#pragma unroll 1
      for (int first_tile = 0; first_tile < team; first_tile += Shape::tiles_at_once) {
        const std::uint32_t first_tile_key = key + team_key + first_tile * step_keys;
        if (Shape::teams && first_tile_key >= piece.keys.end) {
          break;
        }
        unsigned char* const first_key_tile = ring + (first_tile - own_tile) * Ring::warp_bytes + Ring::key_tile(stage);
        unsigned char* const first_value_tile = first_key_tile + (Ring::value_tile(0) - Ring::key_tile(0));
        if (!Shape::teams) {
          __pipeline_wait_prior(Ring::in_flight);
          __syncwarp();
          reader.align_keys(stage);
        }
        Scores<Shape> scores;
        unsigned excluded = 0; // of the first tile: with a mask there are no teams
        multiply_keys<Shape>(half, first_key_tile, key_rows, own_bits(key_early), queries, scores);
#pragma unroll
        for (int i = 0; i < Shape::tiles_at_once; ++i) {
          const unsigned missing = !may_have_pages<path> ? 0u
                                   : Shape::teams        ? missing_keys[warp - own_tile + first_tile + i]
                                                         : reader.missing(stage);
          if (!Shape::teams) {
            __syncwarp(); // all lanes have read the tile
            reader.copy_keys(stage);
          }
          const std::uint32_t tile_key = first_tile_key + i * step_keys;
          if (modified) {
            excluded = modifiers.apply(problem, piece, tile_key, scores[i]);
            modifiers.load_mask(problem, piece, key + stride);
          } else {
            scale_scores<Shape>(problem.scale, scores[i]);
          }
          if (missing != 0 || tile_key < piece.keys.begin || tile_key + reach > piece.keys.end) {
            replace_scores<Shape, path>(piece.keys, tile_key, missing, excluded, scores[i]);
          }
        }
        softmax_step<Shape>(scores, state);
        if (!Shape::teams) {
          __pipeline_wait_prior(Ring::in_flight);
          __syncwarp();
          reader.align_values(stage);
        }
        if (modified) {
          if (__any_sync(0xffffffffu, excluded != 0)) {
            if (half ? any_not_finite<Shape, true>(first_value_tile, value_rows)
                     : any_not_finite<Shape, false>(first_value_tile, value_rows)) {
              shield_excluded_values<Shape>(half, first_value_tile, excluded, scores[0], state);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < Shape::tiles_at_once; ++i) {
          std::uint32_t weights[Shape::head_blocks][2];
          pack_weights<Shape>(half, scores[i], weights);
          multiply_values<Shape>(half, first_value_tile + i * Ring::warp_bytes, value_rows, weights, state);
        }
      }
      if (Shape::teams) {
        meet(); // all have read the tiles
        reader.copy_keys(stage);
      } else {
        __syncwarp();
      }
      reader.copy_values(stage);
      reader.advance();
      stage = stage + 1 == Ring::stages ? 0 : stage + 1;
      if (walk && state.chains >= output_chain_steps / state_chain_steps) {
        stage_state<Shape>(states, staged, value_early, state);
        staged = true;
      }
    }
    if (!walk) {
      __pipeline_wait_prior(0);
      __syncwarp();
    }
    stage_state<Shape>(states, may_walk<path> && staged, value_early, state);
    finish_piece<false>(args, {piece, heads, piece.whole ? Cut{} : pieces.cut(piece), states, area});
  }
}

} // namespace single_query
