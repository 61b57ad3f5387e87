// Attention on host memory: the plan that cuts the keys into tasks, and what shares the tasks out.
//
// A task is some query heads of one key/value head, or all of several whose rows lie side by side, over one split of
// the keys. Which splits there are is a function of the problem alone, never of the number of threads; a row of more
// than one split leaves its partial states in the workspace, to be merged in order when all tasks are done.
#include "host_kernels_cpu.h"
#include "validate.h"

#include <algorithm>

namespace single_query {
namespace {

constexpr std::int64_t wanted_tasks = 128;           // enough for the threads of large machines
constexpr std::int64_t least_split_bytes = 64 << 10; // of keys and values: fewer are not worth a merge
constexpr std::int64_t serial_bytes = 32 << 10;      // of keys and values: fewer are not worth a second thread
constexpr std::int64_t workspace_alignment = 64;

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0);
}
std::int64_t round_up(std::int64_t a, std::int64_t b) {
  return divide_up(a, b) * b;
}

// Before the first task of a row (the rows of one batch entry): blocks of work, and partial states of query heads.
struct RowStart {
  std::int64_t work;
  std::int64_t partials;
};

struct HostPlan {
  std::int64_t group;         // query heads that share a key/value head
  std::int64_t tiles;         // that a group is cut into: a task holds one of them
  std::int64_t tile_heads;    // query heads of a tile
  std::int64_t most_kv_heads; // of a task: more than one only where a tile is a whole group
  std::int64_t row_bytes;     // of one key and one value
  std::int64_t least_split_keys;
  std::int64_t most_partials; // partial states of query heads
};

HostPlan make_plan(const AttentionProblem& problem) {
  HostPlan plan{};
  plan.group = problem.query_heads / problem.kv_heads;
  plan.tiles = divide_up(plan.group, most_task_heads);
  plan.tile_heads = divide_up(plan.group, plan.tiles);
  // Where one key's rows of all heads lie side by side, a task goes through several heads before the next keys: a page
  // of memory is looked up once for all of them, and what the processor reads ahead of a row is of use.
  const bool heads_are_near = problem.key_stride_head < problem.key_stride_slot;
  plan.most_kv_heads = heads_are_near && plan.tiles == 1 ? std::min(problem.kv_heads, most_task_heads / plan.group) : 1;
  plan.row_bytes = 2 * problem.head_dim * bytes_of(problem.dtype);
  // A given split size is rounded up to whole blocks.
  plan.least_split_keys = round_up(problem.split_size > 0 ? std::min(problem.split_size, std::int64_t{1} << 31)
                                                          : least_split_bytes / plan.row_bytes,
                                   block_keys);
  const std::int64_t most_splits = divide_up(capacity(problem), plan.least_split_keys);
  if (most_splits > 1) {
    const std::int64_t rows = problem.batch * problem.query_heads;
    if (__builtin_mul_overflow(rows, most_splits, &plan.most_partials)) {
      plan.most_partials = std::numeric_limits<std::int64_t>::max();
    }
    if (problem.split_size == 0) {
      // Where the plan chooses, rows of more than one split have at most twice the wanted tasks, see split_keys().
      plan.most_partials = std::min(plan.most_partials, 2 * wanted_tasks * plan.most_kv_heads * plan.tile_heads);
    }
  }
  return plan;
}

// Key/value heads of a task when all rows together have `total_keys` keys: as many as leave the wanted tasks, and no
// fewer in the last task than need be.
std::int64_t task_kv_heads(const AttentionProblem& problem, const HostPlan& plan, std::int64_t total_keys) {
  const std::int64_t tasks = total_keys / plan.least_split_keys * problem.kv_heads;
  const std::int64_t most = std::clamp(tasks / wanted_tasks, std::int64_t{1}, plan.most_kv_heads);
  return divide_up(problem.kv_heads, divide_up(problem.kv_heads, most));
}

// Keys of a split, of which a row has `head_tasks` tasks, when all rows together have `total_keys` keys.
std::int64_t split_keys(const AttentionProblem& problem, const HostPlan& plan, std::int64_t head_tasks,
                        std::int64_t total_keys) {
  if (problem.split_size > 0) {
    return plan.least_split_keys;
  }
  return std::max(plan.least_split_keys, round_up(divide_up(total_keys * head_tasks, wanted_tasks), block_keys));
}

// How the keys of a row are cut; where the plan chooses, into equal splits.
struct RowSplits {
  RowSplits(const AttentionProblem& problem, std::int64_t batch, std::int64_t most_keys)
      : length(row_length(problem, batch)), keys(attended_keys(problem, length)), split_keys(most_keys) {
    const std::int64_t count = keys.end - keys.begin;
    if (problem.split_size == 0 && count > 0) {
      split_keys = round_up(divide_up(count, divide_up(count, most_keys)), block_keys);
    }
    splits = std::max(divide_up(count, split_keys), std::int64_t{1});
    task_work = std::min(count, split_keys) / block_keys + 1;
  }

  std::uint32_t length;
  KeyRange keys;
  std::int64_t split_keys;
  std::int64_t splits;
  std::int64_t task_work; // blocks, and one for what a task costs besides
};

std::size_t row_starts_bytes(const AttentionProblem& problem) {
  return static_cast<std::size_t>(
      round_up((problem.batch + 1) * static_cast<std::int64_t>(sizeof(RowStart)), workspace_alignment));
}

std::size_t workspace_bytes(const AttentionProblem& problem, const HostPlan& plan) {
  std::size_t bytes = 0;
  const std::size_t partial_bytes = static_cast<std::size_t>(partial_floats(problem.head_dim)) * sizeof(float);
  if (__builtin_mul_overflow(static_cast<std::size_t>(plan.most_partials), partial_bytes, &bytes) ||
      __builtin_add_overflow(bytes, row_starts_bytes(problem), &bytes)) {
    refuse_splits(problem);
  }
  return bytes;
}

bool is_empty(const AttentionProblem& problem) {
  return problem.batch == 0 || problem.query_heads == 0;
}

void share_out(const ParallelFor& parallel_for, bool serial, std::int64_t tasks,
               const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (serial || tasks == 1 || !parallel_for) {
    body(0, tasks);
  } else {
    parallel_for(tasks, body);
  }
}

// One call, with its workspace laid out.
class HostCall {
public:
  HostCall(const AttentionProblem& problem, const HostPlan& plan, void* workspace)
      : problem_(problem), plan_(plan), kernels_(host_kernels()), starts_(static_cast<RowStart*>(workspace)),
        partials_(reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + row_starts_bytes(problem))) {
    std::int64_t total_keys = 0;
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const KeyRange keys = attended_keys(problem, row_length(problem, b));
      total_keys += keys.end - keys.begin;
    }
    kv_heads_ = task_kv_heads(problem, plan, total_keys);
    head_tasks_ = divide_up(problem.kv_heads, kv_heads_) * plan.tiles;
    most_keys_ = split_keys(problem, plan, head_tasks_, total_keys);
    bytes_ = total_keys * problem.kv_heads * plan.row_bytes;
    RowStart start{0, 0};
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      starts_[b] = start;
      const RowSplits row(problem, b, most_keys_);
      start.work += row.splits * head_tasks_ * row.task_work;
      start.partials += row.splits > 1 ? row.splits * problem.query_heads : 0;
    }
    starts_[problem.batch] = start;
  }

  void run(const ParallelFor& parallel_for) const {
    const bool serial = bytes_ <= serial_bytes;
    share_out(parallel_for, serial, starts_[problem_.batch].work,
              [this](std::int64_t begin, std::int64_t end) { attend(begin, end); });
    if (starts_[problem_.batch].partials > 0) {
      share_out(parallel_for, serial, problem_.batch * problem_.query_heads,
                [this](std::int64_t begin, std::int64_t end) { merge(begin, end); });
    }
  }

private:
  // The tasks whose first block of work lies in [begin, end): equal ranges are equal work.
  void attend(std::int64_t begin, std::int64_t end) const {
    const RowStart* after = std::upper_bound(starts_, starts_ + problem_.batch, begin,
                                             [](std::int64_t work, const RowStart& row) { return work < row.work; });
    for (std::int64_t b = after - starts_ - 1; b < problem_.batch && starts_[b].work < end; ++b) {
      const RowSplits row(problem_, b, most_keys_);
      const std::int64_t tasks = row.splits * head_tasks_;
      const std::int64_t skipped = std::max(begin - starts_[b].work, std::int64_t{0});
      std::int64_t task = divide_up(skipped, row.task_work);
      for (; task < tasks && starts_[b].work + task * row.task_work < end; ++task) {
        attend(b, row, task);
      }
    }
  }

  void attend(std::int64_t b, const RowSplits& row, std::int64_t index) const {
    const std::int64_t split = index / head_tasks_;
    const std::int64_t head_task = index % head_tasks_;
    const std::int64_t first_in_group = head_task % plan_.tiles * plan_.tile_heads;
    const std::int64_t first_key = row.keys.begin + split * row.split_keys;
    HostTask task{};
    task.batch = b;
    task.kv_head = head_task / plan_.tiles * kv_heads_;
    task.first_query_head = task.kv_head * plan_.group + first_in_group;
    task.kv_heads = static_cast<int>(std::min(kv_heads_, problem_.kv_heads - task.kv_head));
    task.query_heads = static_cast<int>(std::min(plan_.tile_heads, plan_.group - first_in_group));
    task.row_length = row.length;
    task.keys.begin = static_cast<std::uint32_t>(first_key);
    task.keys.end = static_cast<std::uint32_t>(std::min<std::int64_t>(first_key + row.split_keys, row.keys.end));
    task.partial = row.splits > 1 ? partial(b, split, task.first_query_head) : nullptr;
    kernels_.attend(problem_, task);
  }

  void merge(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = i / problem_.query_heads;
      HostPartials partials{};
      partials.batch = b;
      partials.query_head = i % problem_.query_heads;
      partials.splits = (starts_[b + 1].partials - starts_[b].partials) / problem_.query_heads;
      partials.first = partial(b, 0, partials.query_head);
      partials.stride = problem_.query_heads * partial_floats(problem_.head_dim);
      if (partials.splits > 0) { // else its only task has finished it
        kernels_.merge_partials(problem_, partials);
      }
    }
  }

  float* partial(std::int64_t b, std::int64_t split, std::int64_t query_head) const {
    return partials_ +
           (starts_[b].partials + split * problem_.query_heads + query_head) * partial_floats(problem_.head_dim);
  }

  const AttentionProblem& problem_;
  const HostPlan& plan_;
  const HostKernels& kernels_;
  RowStart* starts_;            // [batch + 1]
  float* partials_;             // [most_partials, partial_floats]: of each row with any [splits, query_heads]
  std::int64_t kv_heads_ = 1;   // of a task
  std::int64_t head_tasks_ = 1; // of each split of a row
  std::int64_t most_keys_ = 0;  // of a split
  std::int64_t bytes_ = 0;      // of keys and values in all
};

} // namespace

std::size_t attention_on_host_workspace_bytes(const AttentionProblem& problem) {
  validate(problem);
  return is_empty(problem) ? 0 : workspace_bytes(problem, make_plan(problem));
}

void attention_on_host(const AttentionProblem& problem, void* workspace, std::size_t bytes,
                       const ParallelFor& parallel_for) {
  validate(problem);
  if (is_empty(problem)) {
    return;
  }
  const HostPlan plan = make_plan(problem);
  validate_workspace(problem, workspace, bytes, workspace_bytes(problem, plan), workspace_alignment);
  HostCall(problem, plan, workspace).run(parallel_for);
}

} // namespace single_query
