#include "split_plan.h"

#include <algorithm>

namespace single_query {
namespace {

constexpr std::uint32_t most_cluster = 8; // blocks; more are not granted everywhere

// Blocks of a walk: as many as are resident at once, or somewhat fewer where that lets rows of equal length end on the
// shares' borders, so that none has to be merged.
std::uint32_t walk_blocks(std::int64_t rows, std::int64_t resident) {
  for (std::int64_t blocks = resident; 4 * blocks >= 3 * resident; --blocks) {
    if (rows % blocks == 0 || blocks % rows == 0) {
      return static_cast<std::uint32_t>(blocks);
    }
  }
  return static_cast<std::uint32_t>(resident);
}

SplitPlan plan_walk(const AttentionProblem& problem, std::int64_t rows, std::uint32_t keys, const BodyTraits& body,
                    const DeviceTraits& device) {
  SplitPlan plan{};
  plan.walk = true;
  plan.team = body.team;
  // Large blocks where they are few. With a split size the same always, or a row's bits would depend on its batch.
  const bool large = body.pairs && problem.split_size == 0 && rows <= device.multiprocessors;
  plan.warps = large ? body.most_warps : body.walk_warps;
  plan.cluster_size = 1;
  plan.clusters = 1;
  plan.pieces_are_units = problem.split_size > 0;
  plan.unit_keys = plan.pieces_are_units
                       ? static_cast<std::uint32_t>(std::min<std::int64_t>(problem.split_size, 0x7fffffff))
                       : static_cast<std::uint32_t>(plan.warps * body.keys_per_warp);
  plan.splits_per_row = units_of(keys, plan.unit_keys);
  const std::uint64_t most_units = static_cast<std::uint64_t>(rows) * plan.splits_per_row;
  plan.units = problem.lengths == nullptr ? most_units : 0;
  const std::uint32_t resident =
      static_cast<std::uint32_t>(device.multiprocessors * (large ? 1 : body.blocks_per_multiprocessor));
  plan.blocks = most_units < resident ? static_cast<std::uint32_t>(most_units) : walk_blocks(rows, resident);
  return plan;
}

} // namespace

SplitPlan make_split_plan(const AttentionProblem& problem, std::int64_t rows, const BodyTraits& body,
                          const DeviceTraits& device) {
  const std::int64_t capacity_keys = capacity(problem);
  const std::uint32_t keys =
      static_cast<std::uint32_t>(problem.window > 0 ? std::min(problem.window, capacity_keys) : capacity_keys);
  const bool lengths_differ = problem.lengths != nullptr && problem.batch > 1;
  if (problem.split_size > 0 || lengths_differ || rows > device.multiprocessors) {
    return plan_walk(problem, rows, keys, body, device);
  }
  // Small blocks on all multiprocessors; large ones where small ones would be more than one cluster a row, which costs
  // a merge through global memory, or too few warps to keep the memory busy.
  const std::uint32_t row_count = static_cast<std::uint32_t>(rows);
  const std::uint32_t half = power_of_two_at_most(static_cast<std::uint32_t>(device.multiprocessors)) / 2;
  const auto blocks_of = [&](int warps, std::uint32_t most_blocks) {
    return blocks_per_row(row_count, keys, most_blocks, static_cast<std::uint32_t>(warps) * body.least_warp_keys);
  };
  SplitPlan plan{};
  plan.team = body.team;
  plan.warps = body.small_warps;
  std::uint32_t blocks = blocks_of(plan.warps, row_count > half ? 2 * row_count : 2 * half);
  const std::uint32_t large_step = static_cast<std::uint32_t>(body.most_warps * body.keys_per_warp);
  if (body.pairs ? blocks > most_cluster && body.most_warps > body.small_warps && 2 * row_count <= half
                 : keys / blocks >= 4 * large_step) {
    plan.warps = body.most_warps;
    blocks = blocks_of(plan.warps, body.pairs ? half : 2 * half);
  }
  if (keys * plan.team <= 8 * most_cluster * large_step) { // a cluster's steps take less than a merge of clusters
    plan.warps = blocks > most_cluster ? body.most_warps : plan.warps;
    blocks = std::min(blocks, most_cluster);
  }
  if (blocks > 1 && !device.has_clusters) {
    return plan_walk(problem, rows, keys, body, device);
  }
  // Clusters of 8 do not fit onto all multiprocessors at once.
  const bool many = blocks * row_count > half && blocks > most_cluster;
  plan.cluster_size = static_cast<int>(many ? (plan.team > 1 ? 4 : 2) : std::min(blocks, most_cluster));
  plan.clusters = static_cast<int>(blocks) / plan.cluster_size;
  plan.least_block_keys = static_cast<std::uint32_t>(plan.warps) * body.least_warp_keys;
  return plan;
}

} // namespace single_query
