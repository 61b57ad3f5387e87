// The host twin's inner functions for every instruction set that this processor has, not only the one it would choose.
#include "each_device.h"
#include "host_kernels_cpu.h"
#include "random_case.h"

#include <vector>

namespace single_query::test {
namespace {

struct InstructionSet {
  const char* name;
  const HostKernels* kernels;
};

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets = {{"baseline", &baseline_host_kernels}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    sets.push_back({"avx2", &avx2_host_kernels});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    sets.push_back({"avx512", &avx512_host_kernels});
  }
#endif
  return sets;
}

// The heads of a task over its row's keys, cut at every `split_keys` of them.
void attend(const HostKernels& kernels, const AttentionProblem& problem, HostTask task, std::uint32_t split_keys) {
  const KeyRange keys = task.keys;
  const std::int64_t count = keys.end - keys.begin;
  const std::int64_t splits = (count + split_keys - 1) / split_keys;
  if (splits <= 1) {
    kernels.attend(problem, task);
    return;
  }
  const std::int64_t stride = task.kv_heads * task.query_heads * partial_floats(problem.head_dim);
  std::vector<float> partials(static_cast<std::size_t>(splits * stride), NAN);
  for (std::int64_t split = 0; split < splits; ++split) {
    const std::int64_t begin = split * split_keys;
    task.keys.begin = keys.begin + static_cast<std::uint32_t>(begin);
    task.keys.end = keys.begin + static_cast<std::uint32_t>(std::min<std::int64_t>(begin + split_keys, count));
    task.partial = partials.data() + split * stride;
    kernels.attend(problem, task);
  }
  for (int h = 0; h < task.kv_heads * task.query_heads; ++h) {
    kernels.merge_partials(problem, {task.batch, task.first_query_head + h, splits,
                                     partials.data() + h * partial_floats(problem.head_dim), stride});
  }
}

// Tasks of `kv_heads` key/value heads, or of fewer where they would have too many query heads.
void attend(const HostKernels& kernels, const AttentionProblem& problem, std::int64_t kv_heads,
            std::uint32_t split_keys) {
  const std::int64_t group = problem.query_heads / problem.kv_heads;
  kv_heads = std::clamp(most_task_heads / group, std::int64_t{1}, kv_heads);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::uint32_t length = row_length(problem, b);
    for (std::int64_t kv_head = 0; kv_head < problem.kv_heads; kv_head += kv_heads) {
      for (std::int64_t first = 0; first < group; first += most_task_heads) {
        HostTask task{};
        task.batch = b;
        task.kv_head = kv_head;
        task.first_query_head = kv_head * group + first;
        task.kv_heads = static_cast<int>(std::min(kv_heads, problem.kv_heads - kv_head));
        task.query_heads = static_cast<int>(std::min(most_task_heads, group - first));
        task.row_length = length;
        task.keys = attended_keys(problem, length);
        attend(kernels, problem, task, split_keys);
      }
    }
  }
}

} // namespace

TEST_CASE("Every instruction set agrees with double, on the CPU") {
  for (const InstructionSet& set : instruction_sets()) {
    int over_gate = 0;
    for (std::uint64_t seed = 7'000'001; seed <= 7'000'150; ++seed) {
      const AttentionData data(random_case(seed, 200'000));
      Placement placement(data, Device::cpu);
      placement.poison_results(Fill::nan);
      attend(*set.kernels, placement.problem, seed % 2 == 0 ? 1 : 3, seed % 3 == 0 ? block_keys : 1u << 31);
      const Comparison comparison =
          compare(placement.results(), reference(data.host_problem()), data.attention_case().dtype, Weights::float32);
      over_gate += comparison.worst_gate > 1;
      INFO(set.name << ": " << to_line(data.attention_case()));
      INFO(comparison.failure);
      CHECK(comparison.passed());
    }
    CHECK(over_gate <= 1);
  }
}

TEST_CASE("Every instruction set merges parts, on the CPU") {
  for (const InstructionSet& set : instruction_sets()) {
    for (const std::int64_t head_dim : {1, 3, 4, 8, 15, 16, 33, 70}) {
      const auto size = static_cast<std::size_t>(head_dim);
      std::vector<float> outputs(3 * size, NAN); // the last part has no key
      for (std::size_t d = 0; d < size; ++d) {
        outputs[d] = static_cast<float>(d);
        outputs[size + d] = 1000;
      }
      const float lse[] = {0, 0, negative_infinity};
      std::vector<float> output(size, NAN);
      float output_lse = NAN;
      MergeProblem problem;
      problem.parts = 3;
      problem.head_dim = head_dim;
      problem.outputs = outputs.data();
      problem.outputs_stride_part = head_dim;
      problem.lse = lse;
      problem.lse_stride_part = 1;
      problem.output = output.data();
      problem.output_lse = &output_lse;
      set.kernels->merge_parts(problem, 0, 0);
      INFO(set.name << ", head_dim " << head_dim);
      for (std::size_t d = 0; d < size; ++d) {
        CHECK(output[d] == (outputs[d] + 1000) / 2);
      }
      CHECK(output_lse == std::log(2.0f));
    }
  }
}

} // namespace single_query::test
