// overlap.h against the definition: two sets of bytes, written out.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "overlap.h"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace single_query {
namespace {

constexpr std::uintptr_t base = 0x10000;

MemoryRegion region(std::uintptr_t start, std::int64_t run_bytes, MemoryRegion::Axis a = {}, MemoryRegion::Axis b = {},
                    MemoryRegion::Axis c = {}) {
  MemoryRegion result;
  result.start = start;
  result.run_bytes = run_bytes;
  result.axes[0] = a;
  result.axes[1] = b;
  result.axes[2] = c;
  CHECK(measure(result));
  return result;
}

// How often each byte from `base` on belongs to the region.
std::vector<int> bytes_of(const MemoryRegion& r, std::size_t size) {
  std::vector<int> count(size);
  for (std::int64_t i = 0; i < r.axes[0].size; ++i) {
    for (std::int64_t j = 0; j < r.axes[1].size; ++j) {
      for (std::int64_t k = 0; k < r.axes[2].size; ++k) {
        const std::int64_t run = i * r.axes[0].stride_bytes + j * r.axes[1].stride_bytes + k * r.axes[2].stride_bytes;
        for (std::int64_t byte = 0; byte < r.run_bytes; ++byte) {
          ++count.at(static_cast<std::size_t>(static_cast<std::int64_t>(r.start - base) + run + byte));
        }
      }
    }
  }
  return count;
}

MemoryRegion random_region(std::mt19937& random, int axes) {
  const auto within = [&random](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  MemoryRegion result = region(base + static_cast<std::uintptr_t>(within(0, 250)), within(1, 6));
  for (int i = 0; i < axes; ++i) {
    result.axes[i] = {within(1, 6), within(0, 30)};
  }
  REQUIRE(measure(result));
  return result;
}

} // namespace

TEST_CASE("Regions overlap exactly when they share a byte") {
  std::mt19937 random(1);
  int overlapping = 0;
  for (int i = 0; i < 30000; ++i) {
    const MemoryRegion a = random_region(random, 3);
    const MemoryRegion b = random_region(random, 3);
    const std::vector<int> bytes_a = bytes_of(a, 900);
    const std::vector<int> bytes_b = bytes_of(b, 900);
    bool shared = false;
    for (std::size_t byte = 0; byte < bytes_a.size(); ++byte) {
      shared |= bytes_a[byte] > 0 && bytes_b[byte] > 0;
    }
    overlapping += shared;
    INFO("configuration " << i);
    REQUIRE(regions_overlap(a, b) == shared);
    REQUIRE(regions_overlap(b, a) == shared);
  }
  CHECK(overlapping > 3000);
  CHECK(overlapping < 27000);
}

TEST_CASE("A region overlaps itself exactly when two of its indices share a byte") {
  std::mt19937 random(2);
  int overlapping = 0;
  for (int i = 0; i < 30000; ++i) {
    const MemoryRegion a = random_region(random, 2);
    bool shared = false;
    for (const int count : bytes_of(a, 900)) {
      shared |= count > 1;
    }
    overlapping += shared;
    INFO("configuration " << i);
    REQUIRE(overlaps_itself(a) == shared);
  }
  CHECK(overlapping > 3000);
  CHECK(overlapping < 27000);
}

TEST_CASE("Rows in the gaps between another tensor's rows do not overlap it") {
  constexpr std::int64_t row = 128;
  constexpr std::int64_t rows = std::int64_t{1} << 30;
  const MemoryRegion even = region(base, row, {rows, 2 * row});
  CHECK_FALSE(regions_overlap(even, region(base + row, row, {rows, 2 * row})));
  CHECK_FALSE(regions_overlap(even, region(base + row, row, {7, 6 * row}, {5, 100 * row})));
  CHECK(regions_overlap(even, region(base + row, row, {7, 3 * row})));
  CHECK(regions_overlap(even, region(base + 1, row, {rows, 2 * row})));
  CHECK(regions_overlap(even, region(base + row - 1, row, {rows, 2 * row})));
}

TEST_CASE("Neighbours that touch do not overlap, and empty regions overlap nothing") {
  CHECK_FALSE(regions_overlap(region(base, 16), region(base + 16, 16)));
  CHECK(regions_overlap(region(base, 17), region(base + 16, 16)));
  CHECK_FALSE(regions_overlap(region(base, 16, {0, 16}), region(base, 16)));
  CHECK_FALSE(regions_overlap(region(base, 0), region(base, 16)));
  CHECK_FALSE(overlaps_itself(region(base, 16, {0, 0}, {4, 0})));
}

TEST_CASE("An output that is expanded or whose rows run into each other overlaps itself") {
  CHECK(overlaps_itself(region(base, 16, {2, 0})));
  CHECK(overlaps_itself(region(base, 16, {2, 15})));
  CHECK(overlaps_itself(region(base, 16, {2, 48}, {4, 16})));
  CHECK_FALSE(overlaps_itself(region(base, 16, {2, 64}, {4, 16})));
  CHECK_FALSE(overlaps_itself(region(base, 16, {4, 16}, {2, 64})));
  CHECK_FALSE(overlaps_itself(region(base, 16, {1, 0}, {4, 16})));
}

TEST_CASE("The extent is exact where it fits into 64 bits and refused where it does not") {
  CHECK(region(base, 4, {3, 100}, {5, 7}).extent == 2 * 100 + 4 * 7 + 4);
  CHECK(region(base, 4, {0, 100}).extent == 0);
  constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  CHECK(region(base, 4, {1, largest}).extent == 4);
  CHECK(region(base, 4, {2, largest - 4}).extent == largest);
  const std::vector<std::vector<MemoryRegion::Axis>> too_large = {
      {{2, largest - 3}}, {{3, largest / 2}}, {{largest, largest}}, {{2, largest / 2}, {2, largest / 2}}};
  for (const std::vector<MemoryRegion::Axis>& axes : too_large) {
    MemoryRegion impossible = region(base, 4);
    std::copy(axes.begin(), axes.end(), impossible.axes);
    CHECK_FALSE(measure(impossible));
  }
  MemoryRegion past_the_end = region(base, 4);
  past_the_end.start = ~std::uintptr_t{0} - 2;
  CHECK_FALSE(measure(past_the_end));
}

} // namespace single_query
