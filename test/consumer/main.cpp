// What an embedding program does: attention over LibTorch's tensors, here checked against LibTorch's own operators.
#include <ATen/ATen.h>
#include <single_query/torch.h>

#include <cmath>
#include <iostream>

int main() {
  const at::Tensor query = at::randn({2, 8, 64});      // [batch, query_heads, head_dim]
  const at::Tensor key = at::randn({2, 2, 100, 64});   // [batch, kv_heads, keys, head_dim]
  const at::Tensor value = at::randn({2, 2, 100, 64}); // as key

  const at::Tensor output = single_query::attention(query, key, value);

  const at::Tensor scores = at::matmul(query.view({2, 2, 4, 64}), key.transpose(2, 3)) / std::sqrt(64.0);
  const at::Tensor expected = at::matmul(at::softmax(scores, -1), value).view({2, 8, 64});
  const bool equal = at::allclose(output, expected, 1e-5, 1e-5);
  std::cout << (equal ? "True" : "False") << '\n';
  return equal ? 0 : 1;
}
