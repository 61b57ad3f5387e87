// The score pipeline: order of the steps, and what each is when it is off.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "score.h"

namespace single_query {
namespace {

bool is_nan(float x) {
  return x != x;
}

bool near(double x, double expected) {
  return std::fabs(x - expected) <= 1e-6 * std::fabs(expected);
}

} // namespace

TEST_CASE("Without modifiers the score is scale times dot, exactly") {
  for (const float dot : {0.0f, 1.0f, -3.25f, 1e30f, 0x1p-140f}) {
    for (const float scale : {1.0f, -0.125f, 0.0f}) {
      CHECK(modified_score({scale, 0, 0}, dot, -5, 0) == scale * dot);
    }
  }
}

TEST_CASE("Softcap bounds the score and leaves a small one nearly alone") {
  const ScoreModifiers capped{1, 50, 0};
  CHECK(modified_score(capped, 10000, 0, 0) == 50);
  CHECK(modified_score(capped, -10000, 0, 0) == -50);
  CHECK(near(modified_score(capped, 25, 0, 0), 50 * std::tanh(0.5)));
  CHECK(near(modified_score(capped, 1e-3f, 0, 0), 1e-3));
  CHECK(modified_score(capped, -negative_infinity, 0, 0) == 50);
}

TEST_CASE("Softcaps at the ends of the range neither overflow nor vanish") {
  CHECK(near(modified_score({1, 1e38f, 0}, 3, 0, 0), 3));
  CHECK(near(modified_score({1, 3e38f, 0}, -0.5f, 0, 0), -0.5));
  CHECK(modified_score({1, 1e-40f, 0}, 0, 0, 0) == 0);
  CHECK(modified_score({1, 1e-40f, 0}, 2, 0, 0) == 1e-40f);
}

TEST_CASE("The scale comes before softcap, softcap before ALiBi, ALiBi before the mask") {
  const ScoreModifiers all{0.5f, 2, 0.25f};
  const double expected = 2 * std::tanh(0.5 * 6 / 2) + 0.25 * -8 + 100;
  CHECK(near(modified_score(all, 6, -8, 100), expected));
}

TEST_CASE("ALiBi takes nothing from the newest key and slope times distance from the others") {
  const ScoreModifiers alibi{1, 0, 0.5f};
  CHECK(modified_score(alibi, 3, 0, 0) == 3);
  CHECK(modified_score(alibi, 3, -4, 0) == 1);
}

TEST_CASE("A mask of -inf gives -inf after softcap") {
  CHECK(modified_score({1, 1, 0}, 5, 0, negative_infinity) == negative_infinity);
}

TEST_CASE("NaN passes through every step") {
  const float not_a_number = std::nanf("");
  CHECK(is_nan(modified_score({1, 0, 0}, not_a_number, 0, 0)));
  CHECK(is_nan(modified_score({1, 30, 0.5f}, not_a_number, -1, 0)));
  CHECK(is_nan(modified_score({1, 30, 0.5f}, 1, -1, not_a_number)));
}

TEST_CASE("The ALiBi slope is found by its strides, and is 0 where there are none") {
  AttentionProblem problem;
  CHECK(alibi_slope(problem, 3, 4) == 0);
  const float slopes[] = {0, 1, 2, 3, 4, 5};
  problem.alibi_slopes = slopes;
  problem.alibi_stride_batch = 3;
  problem.alibi_stride_head = 1;
  CHECK(alibi_slope(problem, 1, 2) == 5);
  problem.alibi_stride_batch = 0;
  CHECK(alibi_slope(problem, 7, 2) == 2);
}

} // namespace single_query
