// The raw interface without LibTorch: two keys of equal score, so that the output is the mean of their values.
#include <single_query/attention.h>

#include <cstdlib>
#include <iostream>

int main() {
  const float query[] = {1, 2, 3, 4}; // [head_dim]
  const float key[8] = {};            // [keys, head_dim]
  const float value[] = {0, 1, 2, 3,  // [keys, head_dim]
                         4, 5, 6, 7};
  float output[4] = {};

  auto problem = single_query::contiguous_problem(single_query::DataType::float32, 1, 1, 1, 2, 4);
  problem.query = query;
  problem.key = key;
  problem.value = value;
  problem.output = output;

  const std::size_t bytes = single_query::attention_on_host_workspace_bytes(problem);
  void* workspace = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  single_query::attention_on_host(problem, workspace, bytes);
  std::free(workspace);

  const bool equal = output[0] == 2 && output[1] == 3 && output[2] == 4 && output[3] == 5;
  std::cout << (equal ? "True" : "False") << '\n';
  return equal ? 0 : 1;
}
