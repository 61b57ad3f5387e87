// Who takes part: this library and what LibTorch offers for the same problem.
#pragma once

#include "benchmark_inputs.h"
#include "benchmark_problem.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace single_query::benchmark {

// Attention over cache `cache`: [batch, query_heads, 1, head_dim], perhaps with axes merged or split.
using Call = std::function<at::Tensor(std::int64_t cache)>;

enum class Backend { automatic, flash, efficient, cudnn, math };

struct Implementation {
  std::string name;
  Call call;
  Backend backend = Backend::automatic;
  bool ours = false;
  // Where every call leaves its result in place: [caches, batch, query_heads, 1, head_dim]; else undefined.
  at::Tensor outputs = {};

  // Makes `backend` the only one that at::scaled_dot_product_attention may take, process-wide.
  void select() const;
};

// This library first. Inputs must outlive the result.
//   single_query       through tensors; in a graph attention_out(), else attention(), which allocates as the peers do
//   single_query_raw   through the raw interface (mode host alone)
//   sdpa_*             at::scaled_dot_product_attention of one backend; sdpa: of LibTorch's choice
//   matmul_softmax     two matmuls and what the problem asks for between them
//   flash_forward      at::_flash_attention_forward, where it alone takes lengths or slopes
// Where a backend cannot share a KV head among query heads, or does it by copying the cache, the group takes the place
// of the query axis, which gives the same result. In front of a name, gather_: pages are first copied into a contiguous
// cache, since LibTorch reads no pages. Masks and biases that stand for an argument of ours are made beforehand.
std::vector<Implementation> implementations(const Problem& problem, const Inputs& inputs, Mode mode);

} // namespace single_query::benchmark
