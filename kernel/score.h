// The score pipeline: from dot(query, key[n]) to the number that softmax sees. The only place that defines it; both
// GPU bodies and the CPU twin call it.
#pragma once

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

} // namespace single_query
