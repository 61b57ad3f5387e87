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
};

constexpr bool is_empty(const MemoryRegion& region) {
  return region.run_bytes == 0 || region.axes[0].size == 0 || region.axes[1].size == 0 || region.axes[2].size == 0;
}

// Bytes from the first to past the last one. False where an index times its stride, their sum or the address past the
// end does not fit: such a tensor cannot exist. Strides are not negative.
[[nodiscard]] bool extent_of(const MemoryRegion& region, std::int64_t& extent);

// Both ask for regions whose extent fits. They are exact (interleaved layouts, where one tensor lies in the gaps of
// another, are told from overlapping ones) except that a search for a common byte which the strides do not shorten is
// given up after some 100,000 steps and then counts as found. Layouts that nest, or that share a period, need no
// search.
bool regions_overlap(const MemoryRegion& a, const MemoryRegion& b);
bool overlaps_itself(const MemoryRegion& region); // at most two axes of more than one index

} // namespace single_query
