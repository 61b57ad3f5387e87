// Test cases that run on the CPU twin and on CUDA, one body for both.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "check_case.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <string>

#define SINGLE_QUERY_TEST_BODIES(claim, body, tags)                                                                    \
  static void body(::single_query::test::Device device);                                                               \
  TEST_CASE(claim ", on the CPU", tags) {                                                                              \
    body(::single_query::test::Device::cpu);                                                                           \
  }                                                                                                                    \
  TEST_CASE(claim ", on CUDA", "[gpu]" tags) {                                                                         \
    body(::single_query::test::Device::cuda);                                                                          \
  }                                                                                                                    \
  static void body(::single_query::test::Device device)
#define SINGLE_QUERY_TEST_BODY(claim, line, tags) SINGLE_QUERY_TEST_BODIES(claim, on_each_device_##line, tags)
#define SINGLE_QUERY_TEST_LINE(claim, line, tags) SINGLE_QUERY_TEST_BODY(claim, line, tags)

// TEST_ON_EACH_DEVICE("claim") { ... device ... }, or ("claim", "[tag]")
#define TEST_ON_EACH_DEVICE(claim, ...) SINGLE_QUERY_TEST_LINE(claim, __LINE__, "" __VA_ARGS__)

namespace single_query::test {

inline void expect_pass(const AttentionData& data, Device device) {
  const Comparison comparison = check(data, device);
  INFO(to_line(data.attention_case()));
  INFO(comparison.failure);
  CHECK(comparison.passed());
}

// SINGLE_QUERY_SWEEP_STRIDE=n in the environment, for tools that slow everything down: one n-th is enough.
inline int sweep_stride() {
  const char* const stride = std::getenv("SINGLE_QUERY_SWEEP_STRIDE");
  return stride == nullptr ? 1 : std::max(std::atoi(stride), 1);
}

// Times that a test repeats its calls: an even number.
inline int repetitions(int usual) {
  return std::max(usual / sweep_stride() / 2 * 2, 2);
}

// Configurations that have to pass, and all but one in a thousand of them (or one) within the gate T2. Every
// sweep_stride()-th is run.
class Sweep {
public:
  explicit Sweep(Device device) : device_(device), stride_(sweep_stride()) {}

  void add(const AttentionCase& attention_case) {
    if (configurations_++ % stride_ != 0) {
      return;
    }
    const Comparison comparison = check(attention_case, device_);
    if (comparison.worst_gate > 1) {
      ++over_gate_;
      WARN("over T2 by " << comparison.worst_gate << ": " << to_line(attention_case));
    }
    INFO(to_line(attention_case));
    INFO(comparison.failure);
    CHECK(comparison.passed());
  }

  void finish() const { CHECK(over_gate_ <= std::max(configurations_ / stride_ / 1000, 1)); }

private:
  Device device_;
  int stride_;
  int configurations_ = 0; // that were added
  int over_gate_ = 0;
};

// Rows `row_a` .. of one result and `row_b` .. of another are the same bits.
inline bool same_rows(const Result& a, std::int64_t row_a, const Result& b, std::int64_t row_b, std::int64_t count) {
  const std::int64_t row_bytes = a.head_dim * format_of(a.dtype).bytes;
  const bool outputs = std::equal(a.output.begin() + row_a * row_bytes, a.output.begin() + (row_a + count) * row_bytes,
                                  b.output.begin() + row_b * row_bytes);
  const bool lses =
      std::equal(a.lse.begin() + row_a, a.lse.begin() + row_a + count, b.lse.begin() + row_b,
                 [](float x, float y) { return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y); });
  return outputs && lses;
}

// Row b of the data by itself, in dense tensors that hold its valid keys and nothing else, has to give the same bits.
inline void expect_same_as_slice(const AttentionData& data, std::int64_t b, Device device) {
  AttentionCase c = data.attention_case();
  const AttentionCase defaults;
  c.batch = 1;
  c.keys = data.length(b) - data.first_key(b);
  c.page_size = 0;
  c.page_table = c.lengths = Layout();
  c.query = defaults.query;
  c.key = defaults.key;
  c.value = defaults.value;
  c.output = defaults.output;
  c.lse = defaults.lse;
  c.window = 0;
  AttentionData slice(c);
  data.copy_row(b, slice, 0, data.first_key(b));
  INFO(to_line(data.attention_case()));
  CHECK(same_rows(run(data, device), b * c.query_heads, run(slice, device), 0, c.query_heads));
}

// An element of a result's output.
inline double output_at(const Result& result, std::int64_t row, std::int64_t d = 0) {
  return decode(result.dtype, result.output.data(), row * result.head_dim + d);
}

} // namespace single_query::test
