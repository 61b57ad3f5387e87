// How the keys of a problem are shared out over thread blocks: one formula of the problem's sizes, the device and what
// the kernel body brings along. No table of shapes, no tuning at run time.
//
// A row is one (batch, key/value head, team's tiles of query heads); blocks of work never share arithmetic across rows.
//  - by_row: few rows. Each row gets `clusters` thread-block clusters of `cluster_size` blocks; each cluster takes an
//    equal range of the row's own keys. Blocks of a cluster merge through distributed shared memory, clusters of a row
//    through global memory. grid = (cluster_size * clusters, rows of a batch entry, batch).
//  - walk: many rows, numbers of them that leave multiprocessors without work, lengths that differ, more keys than a
//    warp can add up by row, or a given split size. The keys of all rows are cut into units, the list of all units into
//    `blocks` equal shares, one a block (stream-K, after Osama et al., "Stream-K", 2023). A row that several blocks
//    share is merged by the last of them. With a given split size a unit is a split, and every split is a piece of its
//    own; else a unit is one step of a block and a piece is as long as row and share allow.
#pragma once

#include "kv_layout.h"

namespace single_query {

struct DeviceTraits {
  int multiprocessors;
  bool has_clusters; // compute capability 9.0 and later
};

// What a kernel body needs the plan to know.
struct BodyTraits {
  int keys_per_warp;             // keys a warp takes in one step
  int team;                      // warps that share their keys and have tiles of query heads of their own
  int walk_warps;                // warps a block in walk mode, but of few rows
  int blocks_per_multiprocessor; // resident blocks of that size
  int small_warps;               // warps a block in by_row mode, of few keys
  int most_warps;                // the same of many
  std::uint32_t least_warp_keys; // fewer keys than this are not worth a warp; a power of two, as numbers of warps are
  std::uint32_t most_steps;      // of a warp in by_row mode; a walk may have more
  bool large_first;              // large blocks from their first step on, not only where they have several
  int blocks_per_pair;           // of multiprocessors, by row; 1 where one large block keeps their memory port busy
};

struct SplitPlan {
  bool walk;
  int warps; // a block
  int team;  // of them: a power of two
  // by_row
  int cluster_size; // 1, 2, 4 or 8
  int clusters;     // a row, at most; rows with fewer keys use fewer
  std::uint32_t least_block_keys; // a power of two
  // walk
  std::uint32_t blocks;
  std::uint32_t unit_keys;
  std::uint64_t units;          // of all rows together; 0: lengths differ, only the device can count
  bool pieces_are_units;        // a split size was given
  std::uint64_t splits_per_row; // then: at most
};

// x at least 1.
SINGLE_QUERY_HOST_DEVICE int log2_floor(std::uint32_t x) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(static_cast<int>(x));
#else
  return 31 - __builtin_clz(x);
#endif
}

SINGLE_QUERY_HOST_DEVICE std::uint32_t power_of_two_at_most(std::uint32_t x) {
  return 1u << log2_floor(x);
}

// Blocks that share a row of `keys` keys in by_row mode: every block gets about least_block_keys or more, all together
// at most most_blocks. Powers of two, so that all shares are equal: equal shares beat more multiprocessors.
SINGLE_QUERY_HOST_DEVICE std::uint32_t blocks_per_row(std::uint32_t rows, std::uint32_t keys, std::uint32_t most_blocks,
                                                      std::uint32_t least_block_keys) {
  const std::uint32_t by_device = most_blocks / rows;
  const std::uint32_t by_keys = (keys + least_block_keys / 2) / least_block_keys;
  const std::uint32_t blocks = by_device < by_keys ? by_device : by_keys;
  return power_of_two_at_most(blocks == 0 ? 1 : blocks);
}

// Units of a row of `keys` keys: at least one, since a row without keys has an output too.
SINGLE_QUERY_HOST_DEVICE std::uint32_t units_of(std::uint32_t keys, std::uint32_t unit_keys) {
  return keys == 0 ? 1 : (keys - 1) / unit_keys + 1;
}

// How the clusters of a row of by_row mode share its keys: cluster i takes `each` keys from key i * each of the row on.
struct ClusterShares {
  std::uint32_t clusters; // that have a share; the row may have more
  std::uint32_t each;     // a multiple of the 64 keys of whole steps: equal work for the warps of a block
};

SINGLE_QUERY_HOST_DEVICE ClusterShares shares_of(const SplitPlan& plan, std::uint32_t keys) {
  if (plan.clusters == 1) {
    return {1, keys};
  }
  // Numbers of clusters are powers of two: shifts instead of divisions, which every block would have to wait for.
  const std::uint32_t least = plan.least_block_keys * static_cast<std::uint32_t>(plan.cluster_size);
  const std::uint32_t wanted = keys >> log2_floor(least);
  const std::uint32_t most = static_cast<std::uint32_t>(plan.clusters);
  const std::uint32_t clusters = wanted < 1 ? 1 : wanted < most ? power_of_two_at_most(wanted) : most;
  return {clusters, (((keys + clusters - 1) >> log2_floor(clusters)) + 63) / 64 * 64};
}

// The plan of `rows` rows. `problem` gives capacity, window, split size, and whether lengths may differ.
SplitPlan make_split_plan(const AttentionProblem& problem, std::int64_t rows, const BodyTraits& body,
                          const DeviceTraits& device);

} // namespace single_query
