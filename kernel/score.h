// The score pipeline: from dot(query, key[n]) to the number that softmax sees. The only place that defines it; both
// GPU bodies and the CPU twin call it.
#pragma once

#include "single_query/attention.h"
#include "softmax_state.h"

namespace single_query {

// What one query head adds to its scores.
struct ScoreModifiers {
  float scale;
  float softcap;     // 0: off
  float alibi_slope; // 0: off
};

// distance = n - (length - 1) <= 0. mask_value: 0 where there is no mask; -inf excludes the key (the caller sees to
// that, because an excluded key's value must not be touched either).
SINGLE_QUERY_HOST_DEVICE float modified_score(const ScoreModifiers& modifiers, float dot, float distance,
                                              float mask_value) {
  float score = modifiers.scale * dot;
  if (modifiers.softcap != 0) {
    score = modifiers.softcap * tanhf(score / modifiers.softcap);
  }
  if (modifiers.alibi_slope != 0) {
    score += modifiers.alibi_slope * distance;
  }
  return score + mask_value;
}

// The ALiBi slope of a query head; 0 where there are none.
SINGLE_QUERY_HOST_DEVICE float alibi_slope(const AttentionProblem& problem, std::int64_t batch,
                                           std::int64_t query_head) {
  return problem.alibi_slopes == nullptr
             ? 0.0f
             : problem.alibi_slopes[batch * problem.alibi_stride_batch + query_head * problem.alibi_stride_head];
}

} // namespace single_query
