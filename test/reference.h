// Attention in double: three plain loops over one query head at a time, from the inputs as they are in memory. Knows
// the public struct and nothing else of the library. The bodies of the loops also run on the device
// (reference_device.cu), where one block takes a head and its threads share the loops.
#pragma once

#include "element.h"
#include "single_query/attention.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace single_query::test {

// How exactly the contract says where in the output a NaN or an infinity stands.
enum class Position : char {
  exact,
  // An infinite value was weighted by less than float arithmetic is sure to tell from 0: 0 * inf = NaN, or the
  // infinity.
  either_nonfinite,
  // A value that is not finite belongs to a score of -inf: weight 0, or a set of keys that counts as empty.
  unspecified
};

// What the mathematics gives, and what the tolerances need; rows are [batch, query_heads].
struct Reference {
  std::int64_t rows = 0;
  std::int64_t head_dim = 0;
  std::vector<double> output;          // [rows, head_dim]
  std::vector<double> value_magnitude; // [rows, head_dim], V~: sum_n weight[n] |value[n]|
  std::vector<double> value_total;     // [rows, head_dim], sum_n |value[n]|, for what underflows
  std::vector<Position> position;      // [rows, head_dim], where a NaN or infinity has to stand
  std::vector<double> lse;             // [rows]
  std::vector<double> score_magnitude; // [rows], A_max with what the modifiers add
  std::vector<std::int64_t> keys;      // [rows], how many took part
};

// Keys begin .. end - 1 can take part, as far as length and window go.
struct ReferenceKeys {
  std::int64_t length;
  std::int64_t begin;
};

SINGLE_QUERY_TEST_HOST_DEVICE inline ReferenceKeys reference_keys(const AttentionProblem& p, std::int64_t b) {
  const std::int64_t capacity = p.max_pages * p.page_size;
  std::int64_t length = capacity;
  if (p.lengths != nullptr) {
    length = p.lengths_type == LengthType::int64 ? static_cast<const std::int64_t*>(p.lengths)[b * p.lengths_stride]
                                                 : static_cast<const std::int32_t*>(p.lengths)[b * p.lengths_stride];
    length = length < 0 ? 0 : length < capacity ? length : capacity;
  }
  return {length, p.window > 0 && p.window < length ? length - p.window : 0};
}

struct ReferenceScore {
  bool included;
  double score;
  double dot_magnitude;   // |scale| sum_d |query_d key_d|, and what softcap adds to it
  double added_magnitude; // |alibi + mask|
  std::int64_t value_row; // where this key's value lies
  bool missing;           // its page does not exist, which makes the row NaN
};

template <DataType Type>
SINGLE_QUERY_TEST_HOST_DEVICE inline ReferenceScore
reference_score(const AttentionProblem& p, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t length) {
  double mask = 0;
  if (p.attn_mask != nullptr) {
    const std::int64_t at = b * p.mask_stride_batch + h * p.mask_stride_head + n * p.mask_stride_key;
    switch (p.mask_type) {
    case MaskType::boolean:
      mask = static_cast<const unsigned char*>(p.attn_mask)[at] != 0 ? 0 : -INFINITY;
      break;
    case MaskType::float32:
      mask = decode<DataType::float32>(p.attn_mask, at);
      break;
    case MaskType::float16:
      mask = decode<DataType::float16>(p.attn_mask, at);
      break;
    case MaskType::bfloat16:
      mask = decode<DataType::bfloat16>(p.attn_mask, at);
      break;
    }
    if (mask == -INFINITY) {
      return {false, -INFINITY, 0, 0, 0, false};
    }
  }
  const bool paged = p.page_table != nullptr;
  const std::int64_t page =
      paged ? p.page_table[b * p.page_table_stride_batch + n / p.page_size * p.page_table_stride_page] : b;
  if (page < 0 || page >= p.pages) {
    return {false, NAN, 0, 0, 0, true};
  }
  const std::int64_t slot = paged ? n % p.page_size : n;
  const std::int64_t kv_head = h / (p.query_heads / p.kv_heads);
  const std::int64_t query_row = b * p.query_stride_batch + h * p.query_stride_head;
  const std::int64_t key_row = page * p.key_stride_page + kv_head * p.key_stride_head + slot * p.key_stride_slot;

  double dot = 0;
  double magnitude = 0;
  for (std::int64_t d = 0; d < p.head_dim; ++d) {
    const double product = decode<Type>(p.query, query_row + d) * decode<Type>(p.key, key_row + d);
    dot += product;
    magnitude += std::fabs(product);
  }
  double score = p.scale * dot;
  magnitude *= std::fabs(static_cast<double>(p.scale));
  if (p.softcap > 0) {
    score = p.softcap * tanh(score / p.softcap);
    const double cap = p.softcap;
    magnitude = std::isinf(dot) ? cap : magnitude + std::fmin(cap, magnitude);
  }
  double added = mask;
  if (p.alibi_slopes != nullptr) {
    const double slope = p.alibi_slopes[b * p.alibi_stride_batch + h * p.alibi_stride_head];
    added += slope * static_cast<double>(n - (length - 1));
  }
  const std::int64_t value_row =
      page * p.value_stride_page + kv_head * p.value_stride_head + slot * p.value_stride_slot;
  return {true, score + added, magnitude, std::fabs(added), value_row, false};
}

constexpr std::int64_t no_value = -1; // the value row of an excluded key

struct ReferenceValue {
  double sum;       // sum_n weight[n] value[n, d]
  double magnitude; // sum_n weight[n] |value[n, d]|
  double total;     // sum_n |value[n, d]|
  Position position;
};

// weights, value_rows: of `count` keys. The weights are not normalised: the largest score's is 1.
template <DataType Type>
SINGLE_QUERY_TEST_HOST_DEVICE inline ReferenceValue reference_value(const AttentionProblem& p, std::int64_t d,
                                                                    std::int64_t count, const double* weights,
                                                                    const std::int64_t* value_rows) {
  ReferenceValue value = {0, 0, 0, Position::exact};
  for (std::int64_t n = 0; n < count; ++n) {
    if (value_rows[n] == no_value) {
      continue;
    }
    const double element = decode<Type>(p.value, value_rows[n] + d);
    value.sum += weights[n] * element;
    value.magnitude += weights[n] * std::fabs(element);
    value.total += std::fabs(element);
    if (weights[n] == 0 && !std::isfinite(element)) {
      value.position = Position::unspecified;
    } else if (weights[n] < 0x1p-24 && std::isinf(element) && value.position == Position::exact) {
      value.position = Position::either_nonfinite;
    }
  }
  return value;
}

// A key whose weight is below this share of the largest key's does not matter to the error of the others.
constexpr double least_weight_that_matters = 0x1p-64;

template <DataType Type>
void reference_row(const AttentionProblem& p, std::int64_t b, std::int64_t h, Reference& result) {
  const ReferenceKeys keys = reference_keys(p, b);
  const auto row = static_cast<std::size_t>(b * p.query_heads + h);
  const auto head_dim = static_cast<std::size_t>(p.head_dim);
  const auto count = static_cast<std::size_t>(keys.length - keys.begin);
  std::vector<double> weights(count); // of key begin + i, as are the next two
  std::vector<std::int64_t> value_rows(count, no_value);
  std::vector<double> added(count);
  const double sink = p.sinks != nullptr ? p.sinks[h * p.sinks_stride] : -INFINITY;
  double max_score = sink;
  double magnitude = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const ReferenceScore key = reference_score<Type>(p, b, h, keys.begin + static_cast<std::int64_t>(i), keys.length);
    if (key.missing) {
      constexpr double nan = std::numeric_limits<double>::quiet_NaN();
      result.lse[row] = nan;
      std::fill_n(result.output.begin() + static_cast<std::ptrdiff_t>(row * head_dim), head_dim, nan);
      return;
    }
    weights[i] = key.score;
    if (key.included) {
      ++result.keys[row];
      value_rows[i] = key.value_row;
      added[i] = key.added_magnitude;
      max_score = std::fmax(max_score, key.score);
      magnitude = std::isfinite(key.dot_magnitude) ? std::fmax(magnitude, key.dot_magnitude) : magnitude;
    }
  }
  // Without a score above -inf there is nothing to weigh; a NaN is not above -inf, but it is not nothing either.
  bool any = false;
  double largest_weight = 0;
  double sum = p.sinks != nullptr ? std::exp(sink - (sink == -INFINITY ? 0 : max_score)) : 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (value_rows[i] != no_value) {
      any = any || weights[i] != -INFINITY;
      weights[i] = std::exp(weights[i] - (max_score == -INFINITY ? 0 : max_score));
      sum += weights[i];
      largest_weight = std::fmax(largest_weight, weights[i]);
    }
  }
  result.lse[row] = sum == 0 ? -INFINITY : std::log(sum) + (max_score == -INFINITY ? 0 : max_score);
  for (std::size_t d = 0; any && d < head_dim; ++d) {
    const ReferenceValue value = reference_value<Type>(
        p, static_cast<std::int64_t>(d), static_cast<std::int64_t>(count), weights.data(), value_rows.data());
    result.output[row * head_dim + d] = value.sum / sum;
    result.value_magnitude[row * head_dim + d] = value.magnitude / sum;
    result.value_total[row * head_dim + d] = value.total;
    result.position[row * head_dim + d] = value.position;
  }
  double added_that_matters = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (value_rows[i] != no_value && weights[i] > least_weight_that_matters * largest_weight) {
      added_that_matters = std::fmax(added_that_matters, added[i]);
    }
  }
  result.score_magnitude[row] = magnitude + added_that_matters + (std::isfinite(sink) ? std::fabs(sink) : 0);
}

inline Reference empty_reference(const AttentionProblem& p) {
  Reference result;
  result.rows = p.batch * p.query_heads;
  result.head_dim = p.head_dim;
  const auto rows = static_cast<std::size_t>(result.rows);
  const auto elements = rows * static_cast<std::size_t>(p.head_dim);
  result.output.assign(elements, 0);
  result.value_magnitude.assign(elements, 0);
  result.value_total.assign(elements, 0);
  result.position.assign(elements, Position::exact);
  result.lse.assign(rows, 0);
  result.score_magnitude.assign(rows, 0);
  result.keys.assign(rows, 0);
  return result;
}

// p: a problem in host memory. Its output and lse are not looked at.
inline Reference reference(const AttentionProblem& p) {
  Reference result = empty_reference(p);
  with_data_type(p.dtype, [&](auto type) {
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t h = 0; h < p.query_heads; ++h) {
        reference_row<type.value>(p, b, h, result);
      }
    }
  });
  return result;
}

} // namespace single_query::test
