// The merge on host memory.
#include "host_kernels_cpu.h"
#include "validate.h"

namespace single_query {

void merge_on_host(const MergeProblem& problem, const ParallelFor& parallel_for) {
  validate(problem);
  const auto merge_rows = [&problem](std::int64_t begin, std::int64_t end) {
    const HostKernels& kernels = host_kernels();
    for (std::int64_t i = begin; i < end; ++i) {
      kernels.merge_parts(problem, i / problem.heads, i % problem.heads);
    }
  };
  const std::int64_t rows = problem.batch * problem.heads;
  if (rows <= 1 || !parallel_for) {
    merge_rows(0, rows);
  } else {
    parallel_for(rows, merge_rows);
  }
}

} // namespace single_query
