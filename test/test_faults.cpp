// Faults that were reported against other attention code: numbers. The ids are explained in README.md.
#include "each_device.h"

#include <string>
#include <vector>

namespace single_query::test {
namespace {

const std::vector<std::string> dtypes = {"dtype=float32 ", "dtype=float16 ", "dtype=bfloat16 "};

Result run_scores(const std::string& line, Device device, const std::vector<double>& scores,
                  const std::vector<double>& values) {
  AttentionData data(parse_case(line + " keys=" + std::to_string(scores.size())));
  data.set_scores(0, 0, scores, values);
  expect_pass(data, device);
  return run(data, device);
}

} // namespace

TEST_ON_EACH_DEVICE("A01: a row of no keys is 0 and -inf beside one that has some") {
  for (const std::string& dtype : dtypes) {
    AttentionData data(parse_case(dtype + "batch=2 keys=10 head_dim=8 lengths=b length_kind=full"));
    data.set_length(0, 0);
    data.set_length(1, 5);
    const Result result = run(data, device);
    for (std::int64_t d = 0; d < 8; ++d) {
      CHECK(output_at(result, 0, d) == 0);
    }
    CHECK(result.lse[0] == -INFINITY);
    expect_same_as_slice(data, 1, device);
  }
}

TEST_ON_EACH_DEVICE("A03: the log-sum-exp of no keys is -inf") {
  for (const std::string& dtype : dtypes) {
    CHECK(run(AttentionData(parse_case(dtype + "keys=0 head_dim=64")), device).lse[0] == -INFINITY);
    AttentionData data(parse_case(dtype + "keys=9 head_dim=64 lengths=b"));
    data.set_length(0, 0);
    CHECK(run(data, device).lse[0] == -INFINITY);
  }
}

TEST_ON_EACH_DEVICE("A04: a NaN in the padding of the cache does not reach the output") {
  AttentionData data(parse_case("dtype=float16 batch=2 keys=3 head_dim=64 lengths=b length_kind=brief"));
  for (const std::int64_t b : {0, 1}) {
    data.set_length(b, 1 + 2 * b);
    for (std::int64_t n = 0; n < 3; ++n) {
      for (std::int64_t d = 0; d < 64; ++d) {
        data.set_query(b, 0, d, 0.5);
        data.set_key(b, 0, n, d, n < data.length(b) ? 0.5 : NAN);
        data.set_value(b, 0, n, d, n < data.length(b) ? 1 : NAN);
      }
    }
  }
  const Result result = run(data, device);
  for (std::int64_t d = 0; d < 64; ++d) {
    CHECK(output_at(result, 0, d) == 1);
    CHECK(output_at(result, 1, d) == 1);
  }
}

TEST_ON_EACH_DEVICE("A05: a NaN in the unfilled slots of the last page does not reach the output") {
  for (const std::string& dtype : dtypes) {
    AttentionData data(parse_case(dtype + "keys=16 head_dim=64 page_size=4 page_table=bp lengths=b length_kind=brief"));
    data.set_length(0, 13);
    AttentionData filled(parse_case(dtype + "keys=13 head_dim=64 seed=5"));
    filled.copy_row(0, data, 0, 0);
    expect_same_as_slice(data, 0, device);
  }
}

TEST_ON_EACH_DEVICE("A06: a NaN under an added -inf does not reach the output") {
  for (const std::string& dtype : dtypes) {
    AttentionData data(parse_case(dtype + "keys=16 head_dim=64 mask=bhk mask_type=float32 mask_keep=1"));
    AttentionData expected(parse_case(dtype + "keys=5 head_dim=64"));
    expected.copy_row(0, data, 0, 0);
    for (std::int64_t n = 0; n < 16; ++n) {
      data.set_mask(0, 0, n, n < 5 ? 0 : -INFINITY);
      for (std::int64_t d = 0; n >= 5 && d < 64; ++d) {
        data.set_key(0, 0, n, d, NAN);
        data.set_value(0, 0, n, d, 0);
      }
    }
    expect_pass(data, device);
    const Result masked = run(data, device);
    const Result slice = run(expected, device);
    CHECK(same_rows(masked, 0, slice, 0, 1));
  }
}

TEST_ON_EACH_DEVICE("A07: a NaN beyond the length stays out, one within it comes out") {
  for (const std::string& dtype : dtypes) {
    AttentionData data(parse_case(dtype + "keys=2 head_dim=4 lengths=b length_kind=full"));
    data.set_key(0, 0, 1, 0, NAN);
    expect_pass(data, device);
    CHECK(std::isnan(output_at(run(data, device), 0, 3)));
    data.set_length(0, 1);
    expect_same_as_slice(data, 0, device);
  }
}

TEST_ON_EACH_DEVICE("A08: huge finite numbers do not make a NaN") {
  AttentionData data(parse_case("dtype=bfloat16 keys=1 head_dim=64 scale=0.125"));
  for (std::int64_t d = 0; d < 64; ++d) {
    data.set_query(0, 0, d, 133120);
    data.set_key(0, 0, 0, d, 133120);
    data.set_value(0, 0, 0, d, 133120);
  }
  CHECK(output_at(run(data, device), 0, 63) == 133120);
}

TEST_ON_EACH_DEVICE("A09: scores below any finite stand-in for -inf still weigh") {
  AttentionData data(parse_case("dtype=bfloat16 keys=2 head_dim=128 scale=0.0883883461"));
  for (std::int64_t d = 0; d < 128; ++d) {
    data.set_query(0, 0, d, 64);
    for (std::int64_t n = 0; n < 2; ++n) {
      data.set_key(0, 0, n, d, -64);
      data.set_value(0, 0, n, d, 1);
    }
  }
  const Result result = run(data, device);
  CHECK(output_at(result, 0, 0) == 1);
  CHECK(std::fabs(result.lse[0] - -46340.257) < 0.02);
}

TEST_ON_EACH_DEVICE("A10: scores past the range of exp do not overflow") {
  for (const std::string& dtype : dtypes) {
    const Result result = run_scores(dtype, device, {152, 152}, {0, 2});
    CHECK(output_at(result, 0) == 1);
    CHECK(std::fabs(result.lse[0] - 152.693147) < 1e-4);
  }
}

TEST_ON_EACH_DEVICE("A11: softcap of huge scores is the cap") {
  for (const std::string& dtype : dtypes) {
    CHECK(output_at(run_scores(dtype + "softcap=50", device, {5000, 10000, -10000}, {0, 2, 7}), 0) == 1);
  }
}

TEST_ON_EACH_DEVICE("A12: softcap does not lift an excluded key") {
  for (const std::string& dtype : dtypes) {
    const std::string base = dtype + "softcap=1 keys=2 head_dim=4 ";
    AttentionData by_length(parse_case(base + "lengths=b length_kind=full"));
    by_length.set_scores(0, 0, {0, 0}, {0, 1000});
    by_length.set_length(0, 1);
    CHECK(output_at(run(by_length, device), 0) == 0);
    AttentionData by_window(parse_case(base + "window=1"));
    by_window.set_scores(0, 0, {0, 0}, {1000, 0});
    CHECK(output_at(run(by_window, device), 0) == 0);
    for (const char* type : {"boolean", "float32"}) {
      AttentionData by_mask(parse_case(base + "mask=bhk mask_keep=1 mask_type=" + type));
      by_mask.set_scores(0, 0, {0, 0}, {0, 1000});
      by_mask.set_mask(0, 0, 0, *type == 'b' ? 1 : 0);
      by_mask.set_mask(0, 0, 1, *type == 'b' ? 0 : -INFINITY);
      CHECK(output_at(run(by_mask, device), 0) == 0);
    }
  }
}

TEST_ON_EACH_DEVICE("A13: a negative scale and a scale of 0 are scales") {
  CHECK(std::fabs(output_at(run_scores("scale=-0.125", device, {0, 8}, {0, 1}), 0) - 0.268941421) < 1e-6);
  CHECK(output_at(run_scores("scale=0", device, {0, 8}, {0, 1}), 0) == 0.5);
}

TEST_ON_EACH_DEVICE("A26: every width of softmax has weights that add up to 1") {
  for (const std::string& dtype : dtypes) {
    for (const char* keys : {"513", "781", "1021"}) {
      AttentionCase c = parse_case(dtype + "batch=2 query_heads=2 head_dim=16 values=zero_keys keys=" + keys);
      AttentionData data(c);
      for (std::int64_t n = 0; n < c.keys; ++n) {
        for (std::int64_t d = 0; d < 16; ++d) {
          data.set_value(0, 0, n, d, 1);
          data.set_value(1, 0, n, d, 1);
        }
      }
      expect_pass(data, device);
      for (std::int64_t row = 0; row < 4; ++row) {
        CHECK(std::fabs(output_at(run(data, device), row, 7) - 1) < 1e-6);
      }
    }
  }
}

TEST_ON_EACH_DEVICE("A28: query head h reads KV head h / (Hq / Hkv)") {
  for (const std::string& dtype : dtypes) {
    AttentionData data(parse_case(dtype + "query_heads=4 kv_heads=2 keys=1 head_dim=3"));
    data.set_scores(0, 0, {1}, {10});
    data.set_scores(0, 1, {1}, {20});
    const Result result = run(data, device);
    CHECK((output_at(result, 0) == 10 && output_at(result, 1) == 10));
    CHECK((output_at(result, 2) == 20 && output_at(result, 3) == 20));
  }
}

TEST_ON_EACH_DEVICE("A38: every split size gives the same rows within the tolerance", "[large]") {
  for (const int splits : {1, 2, 3, 8, 16, 32, 64, 128}) {
    expect_pass(AttentionData(parse_case("dtype=bfloat16 query_heads=16 kv_heads=8 keys=4096 head_dim=128 "
                                         "scale=0.0883883461 key_magnitude=4 split_size=" +
                                         std::to_string(4096 / splits))),
                device);
  }
}

TEST_ON_EACH_DEVICE("A39: every number of splits gives finite numbers", "[large]") {
  for (int splits = 1; splits <= 130; splits += splits < 24 ? 1 : 7) {
    for (const std::string& dtype : dtypes) {
      AttentionCase c = parse_case(dtype + "query_heads=2 keys=2048 head_dim=64 scale=0.125");
      c.split_size = (2048 + splits - 1) / splits;
      expect_pass(AttentionData(c), device);
    }
  }
  for (const char* split_size : {"1", "2", "3", "5", "100000", "9223372036854775807"}) {
    expect_pass(AttentionData(parse_case("query_heads=2 keys=300 head_dim=8 split_size=" + std::string(split_size))),
                device);
  }
}

TEST_ON_EACH_DEVICE("A40: what outputs and scratch held before does not matter") {
  // check() runs each case over all three fills; several splits use the scratch.
  for (const std::string& dtype : dtypes) {
    for (const char* fill : {"nan", "infinity", "byte_7f"}) {
      expect_pass(AttentionData(parse_case(
                      dtype + "batch=2 query_heads=4 kv_heads=2 keys=5000 head_dim=64 fill=" + std::string(fill))),
                  device);
    }
  }
}

TEST_ON_EACH_DEVICE("A44: the log-sum-exp is natural") {
  for (const std::string& dtype : dtypes) {
    CHECK(std::fabs(run_scores(dtype, device, {1}, {3}).lse[0] - 1) < 1e-6);
  }
}

TEST_ON_EACH_DEVICE("A45: a window of W keeps the newest W keys") {
  const std::vector<double> values = {1, 2, 4, 8, 16, 32, 64, 128};
  const std::vector<double> scores(8, 0.0);
  for (const std::string& dtype : dtypes) {
    CHECK(output_at(run_scores(dtype + "window=1", device, scores, values), 0) == 128);
    const double mean = output_at(run_scores("window=3", device, scores, values), 0);
    CHECK(std::fabs(mean - 74.6666667) < 1e-4);
    CHECK(output_at(run_scores(dtype + "window=8", device, scores, values), 0) ==
          rounded(parse_case(dtype).dtype, 31.875));
    CHECK(output_at(run_scores(dtype + "window=9", device, scores, values), 0) ==
          rounded(parse_case(dtype).dtype, 31.875));
  }
}

TEST_ON_EACH_DEVICE("A50: fewer keys than a tile") {
  for (const std::string& dtype : dtypes) {
    for (const char* keys : {"1", "2", "3", "64"}) {
      AttentionData data(parse_case(dtype + "head_dim=16 scale=0.25 keys=" + keys));
      expect_pass(data, device);
    }
    AttentionData one(parse_case(dtype + "head_dim=16 keys=1"));
    CHECK(first_bit_difference(run(one, device), reference(one.host_problem()), parse_case(dtype).dtype) == "");
  }
}

TEST_ON_EACH_DEVICE("A51: partial outputs of 32 splits keep float32") {
  for (const std::string& dtype : dtypes) {
    expect_pass(AttentionData(parse_case(dtype + "query_heads=4 keys=8192 head_dim=64 scale=0.125 value_mean=100 "
                                                 "split_size=256")),
                device);
  }
}

} // namespace single_query::test
