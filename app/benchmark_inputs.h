// Random tensors for a problem, and what attention over them is in double.
#pragma once

#include "benchmark_problem.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace single_query::benchmark {

// The cap of problems with softcap.
constexpr double softcap_value = 20.0;

struct Inputs {
  at::Tensor query; // [batch, query_heads, 1, head_dim]

  // Several caches with the same lengths and page table, so that a caller who walks through them finds each one cold.
  // Contiguous: [batch, kv_heads, keys, head_dim], stored [batch, keys, kv_heads, head_dim].
  // Paged: [pages, kv_heads, page_size, head_dim], stored [pages, page_size, kv_heads, head_dim].
  std::vector<at::Tensor> key;
  std::vector<at::Tensor> value;

  // What the problem does not have is absent.
  std::optional<at::Tensor> lengths;      // int32 [batch]
  std::optional<at::Tensor> page_table;   // int32 [batch, max_pages], pages in shuffled order, -1 past the length
  std::optional<at::Tensor> mask;         // bool or the query's dtype, [batch, 1, 1, keys]
  std::optional<at::Tensor> alibi_slopes; // float32 [query_heads]
  std::optional<at::Tensor> sinks;        // float32 [query_heads]

  double scale() const;
  std::int64_t caches() const { return static_cast<std::int64_t>(key.size()); }
};

// cold_bytes: what one round through all caches reads at least, where 2,048 caches and memory_limit (bytes) suffice.
Inputs make_inputs(const Problem& problem, at::Device device, double cold_bytes, double memory_limit);

// Attention over cache `cache` in double, with a bound on the error of a correct implementation for each element.
struct Expected {
  at::Tensor output; // float64 [batch, query_heads, head_dim]
  at::Tensor bound;  // the same shape
};
Expected expected_output(const Problem& problem, const Inputs& inputs, std::int64_t cache);

// What is wrong with `output` ([batch, query_heads, 1, head_dim], or without the axis of size 1), in words; empty where
// every element is within its bound.
std::string fault(const Expected& expected, const at::Tensor& output);

// The same for the LibTorch peers, which round scores and weights to the query's dtype: only whether it is the same
// problem at all that they solved.
std::string gross_fault(const Expected& expected, const at::Tensor& output);

} // namespace single_query::benchmark
