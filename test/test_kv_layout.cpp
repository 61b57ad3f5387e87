// Lengths, windows and pages: which keys a row attends to, and where they lie.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "kv_layout.h"

namespace single_query {
namespace {

constexpr std::int64_t most_keys = std::numeric_limits<std::int32_t>::max();

AttentionProblem contiguous(std::int64_t batch, std::int64_t keys) {
  AttentionProblem problem;
  problem.batch = problem.pages = batch;
  problem.page_size = keys;
  return problem;
}

} // namespace

TEST_CASE("Without lengths a row has all the keys that are allocated for it") {
  CHECK(row_length(contiguous(2, 10), 1) == 10);
  CHECK(row_length(contiguous(1, 0), 0) == 0);
  CHECK(row_length(contiguous(1, most_keys), 0) == most_keys);
  AttentionProblem paged;
  paged.max_pages = 3;
  paged.page_size = 16;
  CHECK(row_length(paged, 0) == 48);
}

TEST_CASE("Lengths of either type are clamped to what is allocated") {
  AttentionProblem problem = contiguous(4, 8);
  const std::int32_t narrow[] = {5, -3, 9, 8};
  problem.lengths = narrow;
  for (const std::int64_t stride : {1, 0}) {
    problem.lengths_stride = stride;
    CHECK(row_length(problem, 0) == 5);
    CHECK(row_length(problem, 1) == (stride == 0 ? 5u : 0u));
    CHECK(row_length(problem, 2) == (stride == 0 ? 5u : 8u));
    CHECK(row_length(problem, 3) == (stride == 0 ? 5u : 8u));
  }
  const std::int64_t wide[] = {
      5, 1, -(std::int64_t{1} << 40), 1, std::int64_t{1} << 40, 1, (std::int64_t{1} << 32) + 3};
  problem.lengths = wide;
  problem.lengths_type = LengthType::int64;
  problem.lengths_stride = 2;
  CHECK(row_length(problem, 0) == 5);
  CHECK(row_length(problem, 1) == 0);
  CHECK(row_length(problem, 2) == 8);
  CHECK(row_length(problem, 3) == 8);
}

TEST_CASE("A window keeps the newest keys, and none is no limit") {
  AttentionProblem problem = contiguous(1, 8);
  for (const std::int64_t window : {0, 1, 3, 7, 8, 9}) {
    problem.window = window;
    const KeyRange keys = attended_keys(problem, 8);
    CHECK(keys.begin == (window == 0 || window > 8 ? 0u : static_cast<std::uint32_t>(8 - window)));
    CHECK(keys.end == 8);
  }
  problem.window = std::int64_t{1} << 40;
  CHECK(attended_keys(problem, static_cast<std::uint32_t>(most_keys)).begin == 0);
  problem.window = 1;
  CHECK(attended_keys(problem, static_cast<std::uint32_t>(most_keys)).begin == most_keys - 1);
  CHECK(attended_keys(problem, 0).begin == 0);
  CHECK(attended_keys(problem, 0).end == 0);
}

TEST_CASE("In a contiguous cache row b's key n is slot n of page b") {
  const KeySlot at = key_slot(contiguous(5, 100), 4, 99);
  CHECK(at.page == 4);
  CHECK(at.slot == 99);
}

TEST_CASE("In a paged cache the page table says where a key lies, by its strides") {
  const std::int32_t table[] = {7, -1, 3, -1, 2147480000, -1, 11, -1};
  AttentionProblem problem;
  problem.page_table = table;
  problem.page_table_stride_batch = 4;
  problem.page_table_stride_page = 2;
  problem.max_pages = 2;
  for (const std::int64_t page_size : {1, 3, 16}) {
    problem.page_size = page_size;
    const auto last = static_cast<std::uint32_t>(page_size - 1);
    CHECK(key_slot(problem, 0, 0).page == 7);
    CHECK(key_slot(problem, 0, last).page == 7);
    CHECK(key_slot(problem, 0, last).slot == last);
    CHECK(key_slot(problem, 0, last + 1).page == 3);
    CHECK(key_slot(problem, 0, last + 1).slot == 0);
    CHECK(key_slot(problem, 1, 0).page == 2147480000);
    CHECK(key_slot(problem, 1, last + 1).page == 11);
  }
}

TEST_CASE("A page exists from 0 to below the number of pages") {
  AttentionProblem problem;
  problem.pages = 3;
  CHECK(page_exists(problem, 0));
  CHECK(page_exists(problem, 2));
  CHECK_FALSE(page_exists(problem, 3));
  CHECK_FALSE(page_exists(problem, -1));
  CHECK_FALSE(page_exists(problem, 2147480000));
}

} // namespace single_query
