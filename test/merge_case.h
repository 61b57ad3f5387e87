// Parts to merge: their tensors, the reference, and a checked call on a device.
#pragma once

#include "attention_data.h"
#include "device.h"
#include "tolerance.h"

#include <vector>

namespace single_query::test {

// One part with one number, in four floats of a device or of the host: its value and log-sum-exp, then the merged ones.
inline MergeProblem smallest_merge(float* numbers) {
  MergeProblem problem;
  problem.parts = 1;
  problem.head_dim = 1;
  problem.outputs = numbers;
  problem.lse = numbers + 1;
  problem.output = numbers + 2;
  problem.output_lse = numbers + 3;
  return problem;
}

struct MergeCase {
  DataType dtype = DataType::float32;
  std::int64_t parts = 1;
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t head_dim = 1;
  Layout outputs = {"pbh"}; // p: part
  Layout lse = {"pbh"};
  Layout output = {"bh"};
  Layout output_lse = {"bh"}; // empty: not wanted
  double lse_spread = 3;
  std::uint64_t seed = 1;
};

class MergeData {
public:
  explicit MergeData(const MergeCase& merge_case); // random parts

  void set_lse(std::int64_t part, std::int64_t row, float value); // rows are [batch, heads]
  void set_output(std::int64_t part, std::int64_t row, std::int64_t d, double value);
  double lse(std::int64_t part, std::int64_t row) const;
  double output(std::int64_t part, std::int64_t row, std::int64_t d) const;

  const MergeCase& merge_case() const { return case_; }
  // In double; the result is compared as attention over `parts` keys whose scores are the parts' log-sum-exps.
  Reference reference() const;
  // Throws std::runtime_error where anything but the results is written.
  Result run(Device device, const ParallelFor& parallel_for = {}) const;

private:
  enum Tensor { outputs, lse_in, output_out, lse_out, tensors };

  std::int64_t element(Tensor tensor, std::int64_t part, std::int64_t row) const;

  MergeCase case_;
  MergeProblem layout_;
  std::array<GuardedBuffer, tensors> buffers_;
  std::array<std::int64_t, tensors> offsets_ = {};
};

} // namespace single_query::test
