// How far a result may lie from the reference, and the comparison itself. NaN and infinity have to stand exactly where
// the reference has them; everything else is measured against two bounds on the output and one on the log-sum-exp.
#pragma once

#include "element.h"
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace single_query::test {

// A result as it was read back, without its strides.
struct Result {
  DataType dtype = DataType::float32;
  std::int64_t rows = 0;
  std::int64_t head_dim = 0;
  std::vector<std::byte> output; // [rows, head_dim] elements of dtype
  std::vector<float> lse;        // [rows]; empty: not asked for
};

constexpr double float_roundoff = 0x1p-24;

// Where probabilities are rounded to a 16-bit dtype before the product with the values (tensor cores), that is one more
// error; everything that accumulates is float32.
enum class Weights { float32, rounded };

struct OutputBounds {
  double hard; // T1: past it is a fault
  double gate; // T2: 99.9 % of all configurations are within it, and none past twice
};

struct OutputScale {
  DataType dtype;
  Weights weights;
  std::int64_t head_dim;
  std::int64_t keys;      // how many took part
  double score_magnitude; // A_max
};

// Beside the two bounds stands what float32 cannot hold: a weight below 2^-126 (the largest is 1, unless a sink takes
// it) or a product below that, of values that may be accumulated times 2^-24.
inline double underflow(std::int64_t keys, double value_total) {
  return 0x1p-126 * value_total + 0x1p-125 * static_cast<double>(keys);
}

inline OutputBounds output_bounds(const OutputScale& scale, double output, double value_magnitude, double value_total) {
  const double dtype_roundoff = unit_roundoff(scale.dtype);
  const double result_rounding =
      dtype_roundoff * std::fabs(output) + (scale.dtype == DataType::float16 ? 0x1p-25 : 0.0);
  const double weight_rounding = scale.weights == Weights::rounded ? dtype_roundoff * value_magnitude : 0.0;
  const auto keys = static_cast<double>(std::max<std::int64_t>(scale.keys, 1));
  const double levels = std::log2(keys); // no chain is longer than all keys, no merge tree deeper than this
  const double hard =
      2 * (static_cast<double>(scale.head_dim) + 8) * scale.score_magnitude + 2 * keys + 4 * (levels + 1) + 16;
  const double gate = 8 + 2 * levels + scale.score_magnitude;
  const double base = result_rounding + weight_rounding + underflow(scale.keys, value_total);
  return {base + float_roundoff * value_magnitude * hard, base + float_roundoff * value_magnitude * gate};
}

inline double lse_bound(std::int64_t keys, double score_magnitude, double lse) {
  const double levels = std::log2(static_cast<double>(std::max<std::int64_t>(keys, 1)));
  return 4 * float_roundoff * (2 + score_magnitude + std::fabs(lse) + levels);
}

// error / bound, where an error of 0 is within a bound of 0, and an infinite bound allows everything finite.
inline double ratio(double error, double bound) {
  return error == 0 ? 0 : error / bound;
}

struct Comparison {
  double worst_hard = 0; // largest error / bound
  double worst_gate = 0;
  double worst_lse = 0;
  std::string failure; // empty: within T1, twice T2 and the log-sum-exp's bound, NaN and infinities in place

  bool passed() const { return failure.empty(); }
};

// Does `actual` have its NaN or infinity where `expected` has it?
inline bool same_kind(double actual, double expected, Position position) {
  switch (position) {
  case Position::unspecified:
    return true;
  case Position::either_nonfinite:
    return !std::isfinite(actual);
  case Position::exact:
    break;
  }
  if (std::isnan(expected) || std::isnan(actual)) {
    return std::isnan(expected) && std::isnan(actual);
  }
  return std::isinf(expected) || std::isinf(actual) ? actual == expected : true;
}

inline Comparison compare(const Result& result, const Reference& expected, DataType dtype, Weights weights) {
  Comparison comparison;
  const auto fail = [&](const std::string& text) {
    if (comparison.failure.empty()) {
      comparison.failure = text;
    }
  };
  const auto rows = static_cast<std::size_t>(expected.rows);
  const auto head_dim = static_cast<std::size_t>(expected.head_dim);
  if (result.dtype != dtype) {
    fail("the result's dtype differs from the problem's");
    return comparison;
  }
  if (result.rows != expected.rows || result.head_dim != expected.head_dim ||
      result.output.size() != rows * head_dim * static_cast<std::size_t>(format_of(dtype).bytes) ||
      (!result.lse.empty() && result.lse.size() != rows)) {
    fail("the result's shape differs from the reference's");
    return comparison;
  }
  const auto describe = [](const char* what, std::size_t row, std::size_t d, double actual, double wanted) {
    char text[160];
    std::snprintf(text, sizeof(text), "%s: row %zu, element %zu is %.9g, expected %.9g", what, row, d, actual, wanted);
    return std::string(text);
  };
  for (std::size_t row = 0; row < rows; ++row) {
    const OutputScale scale = {dtype, weights, expected.head_dim, expected.keys[row], expected.score_magnitude[row]};
    for (std::size_t d = 0; d < head_dim; ++d) {
      const std::size_t at = row * head_dim + d;
      const double actual = decode(dtype, result.output.data(), static_cast<std::int64_t>(at));
      const double wanted = expected.output[at];
      if (!same_kind(actual, wanted, expected.position[at])) {
        fail(describe("output, NaN or infinity out of place", row, d, actual, wanted));
      } else if (std::isfinite(actual) && std::isfinite(wanted)) {
        const OutputBounds bounds =
            output_bounds(scale, wanted, expected.value_magnitude[at], expected.value_total[at]);
        const double error = std::fabs(actual - wanted);
        comparison.worst_hard = std::max(comparison.worst_hard, ratio(error, bounds.hard));
        comparison.worst_gate = std::max(comparison.worst_gate, ratio(error, bounds.gate));
        if (error > bounds.hard) {
          fail(describe("output past the hard bound T1", row, d, actual, wanted));
        } else if (error > 2 * bounds.gate) {
          fail(describe("output past twice the gate T2", row, d, actual, wanted));
        }
      }
    }
    if (!result.lse.empty()) {
      const double actual = result.lse[row];
      const double wanted = expected.lse[row];
      if (!same_kind(actual, wanted, Position::exact)) {
        fail(describe("lse, NaN or infinity out of place", row, 0, actual, wanted));
      } else if (std::isfinite(wanted)) {
        const double bound = lse_bound(expected.keys[row], expected.score_magnitude[row], wanted);
        comparison.worst_lse = std::max(comparison.worst_lse, ratio(std::fabs(actual - wanted), bound));
        if (std::fabs(actual - wanted) > bound) {
          fail(describe("lse past its bound", row, 0, actual, wanted));
        }
      }
    }
  }
  return comparison;
}

// The result in the bits it has to have: for data whose answer is exact.
inline std::string first_bit_difference(const Result& result, const Reference& expected, DataType dtype) {
  if (result.dtype != dtype || result.rows != expected.rows || result.head_dim != expected.head_dim ||
      result.output.size() != expected.output.size() * static_cast<std::size_t>(format_of(dtype).bytes)) {
    return "the result's dtype or shape differs from the reference's";
  }
  for (std::size_t at = 0; at < expected.output.size(); ++at) {
    const double wanted = rounded(dtype, expected.output[at]);
    const double actual = decode(dtype, result.output.data(), static_cast<std::int64_t>(at));
    if (!(actual == wanted)) {
      return "output element " + std::to_string(at) + " is " + std::to_string(actual) + ", exactly " +
             std::to_string(wanted) + " is right";
    }
  }
  return {};
}

} // namespace single_query::test
