#include "overlap.h"

#include <algorithm>
#include <initializer_list>

namespace single_query {
namespace {

constexpr int search_steps = 100'000;

using Axis = MemoryRegion::Axis;

// What an axis adds to the distance of the first and the last run.
std::int64_t reach(const Axis& axis) {
  return (axis.size - 1) * axis.stride_bytes;
}

// Of a region whose sums are known to fit.
std::int64_t extent_of(const MemoryRegion& region) {
  return reach(region.axes[0]) + reach(region.axes[1]) + reach(region.axes[2]) + region.run_bytes;
}

// Axes by ascending stride; those of one index last, with stride 0.
void sort_axes(MemoryRegion& region) {
  for (Axis& axis : region.axes) {
    axis.stride_bytes = axis.size == 1 ? 0 : axis.stride_bytes;
  }
  std::sort(region.axes, region.axes + 3, [](const Axis& a, const Axis& b) {
    return (a.size > 1) != (b.size > 1) ? a.size > 1 : a.stride_bytes < b.stride_bytes;
  });
}

// The same bytes with the fewest axes: an axis whose stride leaves no gap between its runs makes one longer run.
MemoryRegion without_dense_axes(MemoryRegion region) {
  sort_axes(region);
  for (Axis& axis : region.axes) {
    if (axis.stride_bytes <= region.run_bytes) {
      region.run_bytes += reach(axis);
      axis = {};
    }
  }
  return region;
}

// Modulo `period` the addresses of a region fill no more than one interval: the axes whose stride is a multiple of it
// vanish. Two such intervals that do not meet prove the regions disjoint.
bool disjoint_modulo(std::int64_t period, const MemoryRegion& a, const MemoryRegion& b) {
  const auto span = [period](const MemoryRegion& region) {
    std::int64_t bytes = region.run_bytes;
    for (const Axis& axis : region.axes) {
      bytes += axis.stride_bytes % period == 0 ? 0 : reach(axis);
    }
    return bytes;
  };
  const std::int64_t span_a = span(a);
  const std::int64_t span_b = span(b);
  const std::int64_t residue_a = static_cast<std::int64_t>(a.start % static_cast<std::uintptr_t>(period));
  const std::int64_t residue_b = static_cast<std::int64_t>(b.start % static_cast<std::uintptr_t>(period));
  const std::int64_t distance = residue_b >= residue_a ? residue_b - residue_a : residue_b - residue_a + period;
  return distance >= span_a && span_b <= period && distance <= period - span_b;
}

bool have_disjoint_periods(const MemoryRegion& a, const MemoryRegion& b) {
  for (const MemoryRegion* region : {&a, &b}) {
    for (const Axis& axis : region->axes) {
      if (axis.stride_bytes > 0 && disjoint_modulo(axis.stride_bytes, a, b)) {
        return true;
      }
    }
  }
  return false;
}

Axis& longest_axis(MemoryRegion& region) {
  return *std::max_element(region.axes, region.axes + 3,
                           [](const Axis& a, const Axis& b) { return reach(a) < reach(b); });
}

// Search by halves: parts whose ranges do not meet are out, two single runs whose ranges meet are the answer.
bool search_common_byte(const MemoryRegion& a, const MemoryRegion& b, int& steps) {
  if (!ranges_overlap(a, b)) {
    return false;
  }
  MemoryRegion first = a;
  MemoryRegion other = b;
  if (reach(longest_axis(first)) < reach(longest_axis(other))) {
    std::swap(first, other);
  }
  Axis& axis = longest_axis(first);
  if (axis.size == 1 || --steps < 0) {
    return true;
  }
  MemoryRegion second = first;
  const std::int64_t half = axis.size / 2;
  longest_axis(second).size -= half;
  second.start += static_cast<std::uintptr_t>(half * axis.stride_bytes);
  axis.size = half;
  first.extent = extent_of(first);
  second.extent = extent_of(second);
  return search_common_byte(first, other, steps) || search_common_byte(second, other, steps);
}

} // namespace

bool measure(MemoryRegion& region) {
  region.extent = 0;
  if (is_empty(region)) {
    return true;
  }
  std::int64_t extent = region.run_bytes;
  for (const Axis& axis : region.axes) {
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(axis.size - 1, axis.stride_bytes, &bytes) ||
        __builtin_add_overflow(extent, bytes, &extent)) {
      return false;
    }
  }
  region.extent = extent;
  std::uintptr_t end = 0;
  return !__builtin_add_overflow(region.start, static_cast<std::uintptr_t>(extent), &end);
}

bool regions_with_common_range_overlap(const MemoryRegion& a, const MemoryRegion& b) {
  if (is_empty(a) || is_empty(b)) {
    return false;
  }
  const MemoryRegion sparse_a = without_dense_axes(a);
  const MemoryRegion sparse_b = without_dense_axes(b);
  int steps = search_steps;
  return !have_disjoint_periods(sparse_a, sparse_b) && search_common_byte(sparse_a, sparse_b, steps);
}

bool overlaps_itself(const MemoryRegion& region) {
  if (is_empty(region)) {
    return false;
  }
  const Axis& first = region.axes[0];
  const Axis& second = region.axes[1];
  if (region.axes[2].size == 1 && (second.size == 1 || second.stride_bytes >= region.run_bytes) &&
      (first.size == 1 || first.stride_bytes >= reach(second) + region.run_bytes)) {
    return false; // dense rows in dense rows, as most are
  }
  MemoryRegion sorted = region;
  sort_axes(sorted);
  const Axis& inner = sorted.axes[0];
  const Axis& outer = sorted.axes[1];
  if (inner.size > 1 && inner.stride_bytes < region.run_bytes) {
    return true;
  }
  // Runs of different outer index: how near does d * outer.stride come to a multiple of inner.stride within reach?
  for (std::int64_t d = 1; d < outer.size && d * outer.stride_bytes < reach(inner) + region.run_bytes; ++d) {
    const std::int64_t below = d * outer.stride_bytes / inner.stride_bytes; // inner steps
    const std::int64_t past = d * outer.stride_bytes % inner.stride_bytes;
    if ((below < inner.size && past < region.run_bytes) ||
        (below + 1 < inner.size && inner.stride_bytes - past < region.run_bytes) || d == search_steps) {
      return true;
    }
  }
  return false;
}

} // namespace single_query
