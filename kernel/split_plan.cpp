#include "split_plan.h"

#include <algorithm>

namespace single_query {
namespace {

constexpr std::uint32_t most_cluster = 8; // blocks; more are not granted everywhere
// Measured on an H200:
constexpr std::uint32_t walk_steps = 16;   // of a block, from which on a walk that fills the device beats idle seats
constexpr std::uint32_t large_steps = 4;   // of a block, from which on large SIMT blocks beat small ones
constexpr std::uint32_t cluster_steps = 5; // of a block, up to which one cluster beats a merge of several

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
  const bool large = problem.split_size == 0 && rows <= device.multiprocessors;
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
  const int seats = large ? std::max(1, body.blocks_per_pair / 2) : body.blocks_per_multiprocessor;
  const std::uint32_t resident = static_cast<std::uint32_t>(device.multiprocessors * seats);
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
  const std::uint32_t row_count = static_cast<std::uint32_t>(rows);
  const std::uint32_t half = power_of_two_at_most(static_cast<std::uint32_t>(device.multiprocessors)) / 2;
  // Large blocks that run at once.
  const std::uint32_t most = std::max(half * static_cast<std::uint32_t>(body.blocks_per_pair), row_count);
  const auto blocks_of = [&](int warps, std::uint32_t most_blocks) {
    return blocks_per_row(row_count, keys, most_blocks, static_cast<std::uint32_t>(warps) * body.least_warp_keys);
  };
  const std::uint32_t large_step = static_cast<std::uint32_t>(body.most_warps * body.keys_per_warp);
  SplitPlan plan{};
  plan.team = body.team;
  plan.warps = body.small_warps;
  std::uint32_t blocks = 0;
  if (body.large_first) {
    // Two steps of few warps are less to merge than one step of many.
    blocks = blocks_of(body.most_warps, most);
    plan.warps = keys <= blocks * large_step ? body.small_warps : body.most_warps;
    // Few rows that leave many multiprocessors without a block, and long enough for a walk to pay.
    const std::uint32_t seats = row_count > half ? 2 * half : most;
    if (blocks * row_count < seats - seats / 8 && keys >= walk_steps * blocks * large_step) {
      return plan_walk(problem, rows, keys, body, device);
    }
  } else {
    blocks = blocks_of(plan.warps, 2 * std::max(half, row_count));
    if (keys / blocks >= large_steps * large_step) {
      plan.warps = body.most_warps;
      blocks = blocks_of(plan.warps, most);
    }
  }
  // More than 2 large blocks of a row, and teams have no others, are one cluster only where half of the device is
  // enough for all rows. A team's steps take long: with less than half of its blocks they cost more than that merge.
  const std::uint32_t room = power_of_two_at_most(std::max(half / row_count, 2u));
  const std::uint32_t one_cluster = plan.team > 1 ? std::min(room, most_cluster) : most_cluster;
  if (keys <= cluster_steps * one_cluster * large_step && (plan.team == 1 || blocks <= 2 * one_cluster)) {
    plan.warps = blocks > one_cluster ? body.most_warps : plan.warps;
    blocks = std::min(blocks, one_cluster);
  }
  const std::uint32_t block_step = static_cast<std::uint32_t>(plan.warps / plan.team * body.keys_per_warp);
  const bool too_long = keys / blocks / block_step >= body.most_steps;
  if ((blocks > 1 && !device.has_clusters) || too_long) {
    return plan_walk(problem, rows, keys, body, device);
  }
  // Clusters of 4 or 8 do not fit onto all multiprocessors at once.
  const bool many = blocks * row_count > half && (blocks > most_cluster || plan.warps == body.most_warps);
  plan.cluster_size = static_cast<int>(std::min(blocks, many ? 2u : most_cluster));
  plan.clusters = static_cast<int>(blocks) / plan.cluster_size;
  plan.least_block_keys = static_cast<std::uint32_t>(plan.warps) * body.least_warp_keys;
  return plan;
}

} // namespace single_query
