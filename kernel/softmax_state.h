// The softmax of a set of keys as a small value: what attention over those keys contributes to attention over more.
//
// Online softmax, after Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018): states of disjoint
// sets of keys merge into the state of their union. Lanes, warps, blocks, clusters, chunks of the CPU twin and the
// public merge() all use the one merge below. Scores and maxima are in natural units.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define SINGLE_QUERY_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SINGLE_QUERY_HOST_DEVICE inline
#endif

namespace single_query {

constexpr float negative_infinity = -__builtin_inff();

// 1 / sum; the fast one on the device: 1 ulp, and exact at powers of two.
SINGLE_QUERY_HOST_DEVICE float reciprocal(float sum) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, sum);
#else
  return 1.0f / sum;
#endif
}

// exp(score - max_score), the weight of a score or the factor that takes a sum of exponentials from one reference to a
// larger one. max_score may still be -inf: then so is score, with weight 0, or it is NaN, with weight NaN.
SINGLE_QUERY_HOST_DEVICE float softmax_weight(float score, float max_score) {
  return expf(score - (max_score == negative_infinity ? 0.0f : max_score));
}

// Equal terms round the same way every time, so that the error of a sum grows as its length does. No sum adds more
// terms than this one by one, longer ones add such chains by add_chain(). Only the tensor cores' outputs, which are
// rounded to 16 bits, are added in longer chains, of up to output_chain_steps steps: they lose half a unit in the last
// place a step, always towards zero, so that 16,384 steps would be seen in a float16.
constexpr int chain_length = 64;
constexpr int output_chain_steps = 4096;

// sum + chain. What that rounds off stays in `chain`, to be the next chain's first term: the error does not grow with
// the number of chains (after Kahan, "Further remarks on reducing truncation errors", 1965).
SINGLE_QUERY_HOST_DEVICE float add_chain(float sum, float& chain) {
  const float total = sum + chain;
  const float rest = chain - (total - sum);
  chain = fabsf(rest) < -negative_infinity ? rest : 0.0f; // an infinite total has none
  return total;
}

// Values are accumulated times a power of two, which is exact and taken out again at the end. Weights lie in (0, 1], on
// the tensor cores in (0, 4]. So for float32 and bfloat16 it keeps the sum of up to 2^22 values near the end of the
// float32 range from overflowing; float16 ends at 2^16 and needs none of that, there it keeps small weights, which the
// tensor cores take in float16, out of its subnormals.
constexpr float wide_value_scale = 0x1p-24f;
constexpr float float16_value_scale = 0x1p13f;

// `values[i]` are Size of the head_dim weighted values: value_scale * sum_n exp(score[n] - max_score) * value[n, i].
template <int Size>
struct SoftmaxState {
  float max_score = negative_infinity; // the largest score that is not NaN, or one near it
  float sum_exp = 0;                   // sum_n exp(score[n] - max_score); 0: no key, or none with a score above -inf
  float values[Size] = {};

  // Refer everything to `new_max`, which is not smaller than max_score.
  SINGLE_QUERY_HOST_DEVICE void raise_max(float new_max) {
    const float factor = softmax_weight(max_score, new_max);
    max_score = new_max;
    sum_exp *= factor;
    for (int i = 0; i < Size; ++i) {
      values[i] *= factor;
    }
  }

  // The state of the union. A state without keys changes nothing; one whose scores were NaN has a NaN sum and is not
  // such a state.
  SINGLE_QUERY_HOST_DEVICE void merge(const SoftmaxState& other) {
    if (other.max_score > max_score) {
      raise_max(other.max_score);
    }
    merge_below(other);
  }

  // merge() where other.max_score is known not to exceed max_score.
  SINGLE_QUERY_HOST_DEVICE void merge_below(const SoftmaxState& other) {
    add(other, softmax_weight(other.max_score, max_score));
  }

  // Add another state's sums times `factor`, which refers them to max_score.
  SINGLE_QUERY_HOST_DEVICE void add(const SoftmaxState& other, float factor) {
    sum_exp += factor * other.sum_exp;
    for (int i = 0; i < Size; ++i) {
      values[i] += factor * other.values[i];
    }
  }

  // The union with a chain of other states that the caller has merged, and whose maximum is not smaller. What is left
  // in `chain`, see add_chain(), has the same maximum and is to be merged with what comes next.
  SINGLE_QUERY_HOST_DEVICE void merge_chain(SoftmaxState& chain) {
    raise_max(chain.max_score);
    sum_exp = add_chain(sum_exp, chain.sum_exp);
    for (int i = 0; i < Size; ++i) {
      values[i] = add_chain(values[i], chain.values[i]);
    }
  }

  // A sink is a score without a value. A row whose keys all have a score of -inf has no key: its values do not count.
  SINGLE_QUERY_HOST_DEVICE void merge_sink(float sink) {
    if (sum_exp == 0) {
      for (int i = 0; i < Size; ++i) {
        values[i] = 0;
      }
    }
    SoftmaxState state;
    state.max_score = sink;
    state.sum_exp = sink == negative_infinity ? 0.0f : 1.0f;
    merge(state);
  }

  // Natural log-sum-exp; -inf without keys.
  SINGLE_QUERY_HOST_DEVICE float log_sum_exp() const {
    return sum_exp == 0 ? negative_infinity : max_score + logf(sum_exp);
  }

  // Element i of the attention output; 0 without keys. `value_scale` is the one the values were accumulated with. The
  // output is a mean of values: where it would overflow only because of rounding, it is the largest number.
  SINGLE_QUERY_HOST_DEVICE float output(int i, float value_scale) const {
    const float scaled = values[i] * reciprocal(sum_exp);
    const float mean = scaled * (1.0f / value_scale);
    const float largest = 0x1.fffffep127f;
    const float finite = fabsf(mean) > largest && fabsf(scaled) <= largest ? copysignf(largest, scaled) : mean;
    return sum_exp == 0 ? 0.0f : finite; // last, so that the division is one for all elements
  }
};

} // namespace single_query
