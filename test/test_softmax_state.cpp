// The one merge of the library, on the host.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "softmax_state.h"

#include <array>
#include <bit>
#include <cstdint>
#include <random>
#include <vector>

namespace single_query {
namespace {

using State = SoftmaxState<2>;

constexpr float infinity = -negative_infinity;
const float not_a_number = std::nanf("");

// One key.
State key(float score, float value, float second = 0) {
  State state;
  state.max_score = score;
  state.sum_exp = 1;
  state.values[0] = value;
  state.values[1] = second;
  return state;
}

State merged(State a, const State& b) {
  a.merge(b);
  return a;
}

bool same_bits(const State& a, const State& b) {
  using Bits = std::array<std::uint32_t, sizeof(State) / sizeof(float)>;
  return std::bit_cast<Bits>(a) == std::bit_cast<Bits>(b);
}

bool is_nan(float x) {
  return x != x;
}

bool near(double x, double expected) {
  return std::fabs(x - expected) <= 2e-6 * (1 + std::fabs(expected));
}

} // namespace

TEST_CASE("The state of no key is the identity of merge, from both sides") {
  const State some = key(3.5f, 2, -7);
  CHECK(same_bits(merged(some, State()), some));
  CHECK(same_bits(merged(State(), some), some));
  CHECK(same_bits(merged(State(), State()), State()));
}

TEST_CASE("A value that its weight of 0 does not hide surfaces as IEEE arithmetic shows it") {
  State weightless; // a key whose score is -inf
  weightless.values[0] = 0.0f * not_a_number;
  weightless.values[1] = 0.0f * 5;
  const State state = merged(key(-2, 2, -7), weightless);
  CHECK(is_nan(state.output(0, 1)));
  CHECK(state.output(1, 1) == -7);
  CHECK(weightless.output(0, 1) == 0); // on its own it counts as no key
}

TEST_CASE("Without keys the output is 0 and the log-sum-exp -inf") {
  const State none = merged(State(), State());
  CHECK(none.output(0, 1) == 0);
  CHECK(none.log_sum_exp() == negative_infinity);
}

TEST_CASE("Two keys of equal score average their values") {
  const State both = merged(key(5, 1, 10), key(5, 3, -10));
  CHECK(both.output(0, 1) == 2);
  CHECK(both.output(1, 1) == 0);
  CHECK(near(both.log_sum_exp(), 5 + std::log(2.0)));
}

TEST_CASE("Merging is commutative and associative within rounding, and agrees with double") {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<State> keys;
    double sum = 0;
    double weighted = 0;
    for (int i = 0; i < 33; ++i) {
      const float score = 10 * normal(random);
      const float value = normal(random);
      keys.push_back(key(score, value));
      sum += std::exp(static_cast<double>(score));
      weighted += std::exp(static_cast<double>(score)) * value;
    }
    State forwards;
    State backwards;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      forwards.merge(keys[i]);
      backwards.merge(keys[keys.size() - 1 - i]);
    }
    State left;
    State right;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      (i < 16 ? left : right).merge(keys[i]);
    }
    for (const State& state : {forwards, backwards, merged(left, right), merged(right, left)}) {
      CHECK(near(state.output(0, 1), weighted / sum));
      CHECK(near(state.log_sum_exp(), std::log(sum)));
    }
  }
}

TEST_CASE("Scores far apart leave the larger one alone, however large they are") {
  for (const float offset : {0.0f, 1e4f, -1e4f, 1e30f, -1e30f}) {
    const float step = std::fabs(offset) > 1e20f ? 1e29f : 1000;
    const State state = merged(key(offset, 1), key(offset - step, 100));
    CHECK(state.output(0, 1) == 1);
    CHECK(state.log_sum_exp() == offset);
    CHECK(same_bits(merged(key(offset - step, 100), key(offset, 1)), state));
  }
}

TEST_CASE("A NaN score surfaces whatever it is merged with, in either order") {
  State from_nan; // what a reduction makes of a key whose score is NaN: no maximum, a NaN sum
  from_nan.sum_exp = not_a_number;
  from_nan.values[0] = not_a_number;
  for (const State& other : {State(), key(0, 1), key(100, 1), key(-1e30f, 1)}) {
    CHECK(is_nan(merged(from_nan, other).output(0, 1)));
    CHECK(is_nan(merged(other, from_nan).output(0, 1)));
    CHECK(is_nan(merged(other, from_nan).log_sum_exp()));
  }
}

TEST_CASE("A NaN or infinite value surfaces in its own element only") {
  const State state = merged(key(0, not_a_number, 1), key(1, 0, 2));
  CHECK(is_nan(state.output(0, 1)));
  CHECK(near(state.output(1, 1), 1 + std::exp(1) / (1 + std::exp(1))));
  CHECK(merged(key(0, infinity), key(1, 0)).output(0, 1) == infinity);
}

TEST_CASE("A score of +inf gives NaN") {
  State state;
  state.max_score = infinity;
  state.sum_exp = softmax_weight(infinity, infinity);
  CHECK(is_nan(merged(state, key(0, 1)).output(0, 1)));
  CHECK(is_nan(merged(key(0, 1), state).log_sum_exp()));
}

TEST_CASE("Chains add up as precisely as one of them, however many they are") {
  constexpr int chains = 1'000'000;
  float sum = 0;
  float chain = 0;
  State total;
  State keys;
  for (int i = 0; i < chains; ++i) {
    chain += 0.1f;
    sum = add_chain(sum, chain);
    keys.merge(key(i == chains / 2 ? 1.0f : 0.0f, 0.3f, 0.7f)); // the maximum rises once
    total.merge_chain(keys);
  }
  const double exact = chains * static_cast<double>(0.1f);
  CHECK(std::fabs(sum - exact) <= 0x1p-24 * exact);
  const double keys_exact = std::log(chains - 1 + std::exp(1.0));
  CHECK(std::fabs(total.log_sum_exp() - keys_exact) <= 0x1p-22 * keys_exact);
  CHECK(std::fabs(total.output(0, 1) - 0.3f) <= 0x1p-22f * 0.3f);
  CHECK(std::fabs(total.output(1, 1) - 0.7f) <= 0x1p-22f * 0.7f);
}

TEST_CASE("An infinite chain leaves nothing behind that could become NaN") {
  float chain = infinity;
  const float sum = add_chain(1, chain);
  CHECK(sum == infinity);
  CHECK(chain == 0);
  chain += 1;
  CHECK(add_chain(sum, chain) == infinity);
  CHECK(chain == 0);
}

TEST_CASE("Scores of -inf count as no key") {
  State state;
  state.sum_exp = softmax_weight(negative_infinity, negative_infinity);
  CHECK(state.sum_exp == 0);
  CHECK(same_bits(merged(key(1, 2), state), key(1, 2)));
}

TEST_CASE("The weight of a score does not pass over NaN, and is exact at the maximum and at -inf") {
  CHECK(softmax_weight(3, 3) == 1);
  CHECK(softmax_weight(negative_infinity, 3) == 0);
  CHECK(is_nan(softmax_weight(not_a_number, 3)));
  CHECK(is_nan(softmax_weight(not_a_number, negative_infinity)));
}

TEST_CASE("A sink takes weight and gives no value") {
  State state = key(2, 8);
  state.merge_sink(2);
  CHECK(state.output(0, 1) == 4);
  CHECK(near(state.log_sum_exp(), 2 + std::log(2.0)));
}

TEST_CASE("With a sink alone the output is 0 and the log-sum-exp the sink") {
  State state;
  state.merge_sink(-3.25f);
  CHECK(state.output(0, 1) == 0);
  CHECK(state.log_sum_exp() == -3.25f);
}

TEST_CASE("A sink of -inf is no sink") {
  State state = key(2, 8);
  state.merge_sink(negative_infinity);
  CHECK(same_bits(state, key(2, 8)));
  State none;
  none.merge_sink(negative_infinity);
  CHECK(none.log_sum_exp() == negative_infinity);
}

TEST_CASE("The scale that values are accumulated with comes out again exactly") {
  for (const float scale : {wide_value_scale, float16_value_scale}) {
    CHECK(key(0, 3 * scale).output(0, scale) == 3);
  }
}

TEST_CASE("Values at the end of float32 do not overflow while they are accumulated") {
  constexpr float largest = std::numeric_limits<float>::max();
  State state;
  for (int i = 0; i < 1024; ++i) {
    state.merge(key(0, largest * wide_value_scale));
  }
  CHECK(state.output(0, wide_value_scale) == largest);
}

} // namespace single_query
