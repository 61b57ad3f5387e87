// Whether tensors share memory: the output of a call may overlap neither an input nor itself.
#pragma once

#include <cstdint>

namespace single_query {

// The bytes of a tensor: runs of `run_bytes` contiguous bytes, one for every index of up to three axes.
struct MemoryRegion {
  struct Axis {
    std::int64_t size = 1;
    std::int64_t stride_bytes = 0;
  };
  const char* name = "";
  std::uintptr_t start = 0;
  std::int64_t run_bytes = 0;
  Axis axes[3] = {};
  std::int64_t extent = 0; // bytes from the first to past the last one, see measure()
};

constexpr bool is_empty(const MemoryRegion& region) {
  return region.run_bytes == 0 || region.axes[0].size == 0 || region.axes[1].size == 0 || region.axes[2].size == 0;
}

// Fills in the extent. False where an index times its stride, their sum or the address past the end does not fit: such
// a tensor cannot exist. Strides are not negative.
[[nodiscard]] bool measure(MemoryRegion& region);

// Of measured regions.
inline bool ranges_overlap(const MemoryRegion& a, const MemoryRegion& b) {
  return a.start < b.start + static_cast<std::uintptr_t>(b.extent) &&
         b.start < a.start + static_cast<std::uintptr_t>(a.extent);
}

// Both ask for measured regions. They are exact (interleaved layouts, where one tensor lies in the gaps of
// another, are told from overlapping ones) except that a search for a common byte which the strides do not shorten is
// given up after some 100,000 steps and then counts as found. Layouts that nest, or that share a period, need no
// search.
bool regions_with_common_range_overlap(const MemoryRegion& a, const MemoryRegion& b);
inline bool regions_overlap(const MemoryRegion& a, const MemoryRegion& b) {
  return ranges_overlap(a, b) && regions_with_common_range_overlap(a, b);
}
bool overlaps_itself(const MemoryRegion& region); // at most two axes of more than one index

} // namespace single_query
