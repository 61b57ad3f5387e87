// Sums of many terms: what rounding leaves of each chain, and rows that one block sums up alone.
#include "each_device.h"

#include <cmath>
#include <vector>

namespace single_query::test {
namespace {

const std::vector<DataType> dtypes = {DataType::float32, DataType::float16, DataType::bfloat16};

void expect_within_gate(const AttentionData& data, Device device) {
  const Comparison comparison = check(data, device);
  INFO(to_line(data.attention_case()));
  INFO(comparison.failure);
  CHECK(comparison.passed());
  CHECK(comparison.worst_gate <= 1);
}

AttentionCase in_one_split(DataType dtype, std::int64_t group, std::int64_t keys, std::int64_t head_dim) {
  AttentionCase c = sized(dtype, 1, 1, group, keys, head_dim);
  c.split_size = keys;
  c.scale = 0;
  return c;
}

} // namespace

TEST_ON_EACH_DEVICE("However many equal terms one block sums up, they agree with double", "[large]") {
  for (const std::int64_t group : {1, 4}) {
    for (const std::int64_t head_dim : {3, 128}) {
      for (const std::int64_t keys : {64, 500, 3000, 20'000}) {
        AttentionCase c = in_one_split(DataType::float32, group, keys, head_dim);
        c.key.shared = c.value.shared = "s";
        expect_within_gate(AttentionData(c), device);
      }
    }
  }
  AttentionCase c = in_one_split(DataType::float32, 1, 1 << 20, 3);
  c.key.shared = c.value.shared = "s";
  expect_within_gate(AttentionData(c), device);
  c.split_size = 64; // many splits, each of them a term
  expect_within_gate(AttentionData(c), device);
  // Weights that are equal and not 1, so that their sum rounds too.
  for (const DataType dtype : dtypes) {
    c = in_one_split(dtype, 1, 1 << 20, 2);
    c.scale = 1;
    AttentionData data(c);
    std::vector<double> scores(1 << 20, 0.0);
    scores[0] = 0.7;
    data.set_scores(0, 0, scores, std::vector<double>(1 << 20, 0.6));
    expect_within_gate(data, device);
  }
  // Of so many query heads every warp takes all keys itself, and tensor cores round towards zero.
  for (const DataType dtype : dtypes) {
    c = in_one_split(dtype, 65, 1 << 19, 2);
    c.key.shared = c.value.shared = "s";
    c.value_mean = 0.6;
    c.value_magnitude = 0;
    expect_within_gate(AttentionData(c), device);
  }
}

TEST_ON_EACH_DEVICE("The sum of the weights of a long row is exact, and rescaled as often as its maximum rises",
                    "[large]") {
  constexpr std::size_t keys = 1 << 19;
  const std::vector<double> values(keys, 0.6);
  for (const DataType dtype : dtypes) {
    AttentionCase c = in_one_split(dtype, 65, keys, 2);
    c.scale = 1;
    std::vector<double> scores(keys, 0.0);
    scores[0] = 0.7;
    AttentionData equal(c);
    equal.set_scores(0, 0, scores, values);
    expect_within_gate(equal, device);
    for (std::size_t n = 0; n < keys; ++n) {
      scores[n] = 8.0 * static_cast<double>(n) / keys;
    }
    AttentionData rising(c);
    rising.set_scores(0, 0, scores, values);
    expect_within_gate(rising, device);
  }
}

TEST_ON_EACH_DEVICE("An infinite value stays one, however many keys come after it") {
  for (const std::int64_t head_dim : {3, 128}) {
    for (const std::int64_t group : {1, 4}) {
      for (const std::int64_t split_size : {32, 10'000}) {
        AttentionCase c = sized(DataType::float32, 1, 1, group, 10'000, head_dim);
        c.split_size = split_size;
        AttentionData data(c);
        data.set_value(0, 0, 0, 0, INFINITY);
        expect_pass(data, device);
      }
    }
  }
}

} // namespace single_query::test
