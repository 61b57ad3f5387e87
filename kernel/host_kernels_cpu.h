// The vectorised inner functions of the host twins, compiled once per instruction set of the processor family: which
// set a machine has is found at run time, so that one binary serves all. No function here is called with arguments
// that validate() has not seen.
#pragma once

#include "kv_layout.h"
#include "mask.h"
#include "score.h"
#include "softmax_state.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace single_query {

constexpr std::int64_t most_task_heads = 32; // query heads that take a block of keys one after another
constexpr std::uint32_t block_keys = 128;    // keys between two looks at the running maximum

// Partial softmax state of one query head: max_score, sum_exp, then head_dim values times the value scale.
constexpr std::int64_t partial_floats(std::int64_t head_dim) {
  return head_dim + 2;
}

// For each of the key/value heads kv_head .. + kv_heads - 1 of a row, `query_heads` query heads that read it, from
// first_query_head on and one after another, over keys that all of them have in reach (masks apart).
struct HostTask {
  std::int64_t batch;
  std::int64_t kv_head;
  std::int64_t first_query_head;
  int kv_heads;
  int query_heads; // of each; kv_heads * query_heads is 1 .. most_task_heads
  std::uint32_t row_length;
  KeyRange keys;
  float* partial; // [kv_heads, query_heads, partial_floats]; null: these are all keys of the row, finish it
};

// The partial states of one query head, in the order of their keys.
struct HostPartials {
  std::int64_t batch;
  std::int64_t query_head;
  std::int64_t splits;
  const float* first;  // [splits, partial_floats]
  std::int64_t stride; // floats from one split to the next
};

struct HostKernels {
  void (*attend)(const AttentionProblem& problem, const HostTask& task);
  void (*merge_partials)(const AttentionProblem& problem, const HostPartials& partials);
  void (*merge_parts)(const MergeProblem& problem, std::int64_t batch, std::int64_t head);
};

extern const HostKernels baseline_host_kernels; // any processor
#if defined(__x86_64__)
extern const HostKernels avx2_host_kernels;   // AVX2, FMA, F16C: x86-64-v3
extern const HostKernels avx512_host_kernels; // AVX-512 F, BW, DQ, VL: x86-64-v4
#endif

// The best of them that this processor runs.
const HostKernels& host_kernels();

} // namespace single_query
