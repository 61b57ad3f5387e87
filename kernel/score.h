// The score pipeline: from dot(query, key[n]) to the number that softmax sees. The only place that defines it; both
// GPU bodies and the CPU twin call it.
#pragma once

#include "single_query/attention.h"
#include "softmax_state.h"

namespace single_query {

// 1 / softcap, as near as float32 comes to it.
SINGLE_QUERY_HOST_DEVICE float inverse_softcap_of(float softcap) {
  return softcap == 0 ? 0.0f : fminf(1.0f / softcap, 0x1.fffffep127f);
}

// What one query head adds to its scores.
struct ScoreModifiers {
  float scale = 1;
  float softcap = 0;     // 0: off
  float alibi_slope = 0; // 0: off
  float inverse_softcap = inverse_softcap_of(softcap);
};

// tanh(x), within 4 units in the last place. On the device without the branch that tanhf() has, since lanes would take
// both sides of it.
SINGLE_QUERY_HOST_DEVICE float branchless_tanh(float x) {
#if defined(__CUDA_ARCH__)
  const float square = x * x;
  // (tanh(x) / x - 1) / x^2 in powers of x^2: least relative error of tanh(x) up to 0.56
  const float tail = fmaf(fmaf(fmaf(0.016273944f, square, -0.05258689f), square, 0.13319421f), square, -0.3333289f);
  const float small = fmaf(x * square, tail, x);
  const float large = 1.0f - __fdividef(2.0f, __expf(2 * fabsf(x)) + 1.0f);
  return fabsf(x) < 0.55f ? small : copysignf(large, x);
#else
  return tanhf(x);
#endif
}

// distance = n - (length - 1) <= 0. mask_value: 0 where there is no mask; -inf excludes the key (the caller sees to
// that, because an excluded key's value must not be touched either).
SINGLE_QUERY_HOST_DEVICE float modified_score(const ScoreModifiers& modifiers, float dot, float distance,
                                              float mask_value) {
  float score = modifiers.scale * dot;
  if (modifiers.softcap != 0) {
    score = modifiers.softcap * branchless_tanh(score * modifiers.inverse_softcap);
  }
  return fmaf(modifiers.alibi_slope, distance, score) + mask_value;
}

// The ALiBi slope of a query head; 0 where there are none.
SINGLE_QUERY_HOST_DEVICE float alibi_slope(const AttentionProblem& problem, std::int64_t batch,
                                           std::int64_t query_head) {
  return problem.alibi_slopes == nullptr
             ? 0.0f
             : problem.alibi_slopes[batch * problem.alibi_stride_batch + query_head * problem.alibi_stride_head];
}

} // namespace single_query
