// Memory that shows who touches what is not theirs: guards of 512 elements on both sides and poison in every gap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace single_query::test {

// What unused memory holds, and outputs and scratch before a call.
enum class Fill { nan, infinity, byte_7f };

constexpr std::int64_t guard_elements = 512;

// Elements of `element_bytes` that hold a NaN, an infinity (negative, so that it excludes as a mask), or bytes 0x7f. In
// an integer buffer they are a large positive, a large negative and a large positive number.
inline void fill_bytes(std::byte* bytes, std::size_t count, Fill fill, int element_bytes, bool is_bfloat16) {
  std::uint64_t pattern = 0x7f7f7f7f7f7f7f7f;
  if (fill == Fill::nan) {
    pattern = element_bytes == 2 ? (is_bfloat16 ? 0x7fc0 : 0x7e00) : element_bytes == 1 ? 0xff : 0x7fc00000;
  } else if (fill == Fill::infinity) {
    pattern = element_bytes == 2 ? (is_bfloat16 ? 0xff80 : 0xfc00) : element_bytes == 1 ? 0x80 : 0xff800000;
  }
  if (element_bytes == 8) {
    pattern = fill == Fill::infinity ? 0xff80000000000000 : 0x7fc0000000000000;
  }
  const auto step = static_cast<std::size_t>(element_bytes);
  for (std::size_t at = 0; at < count; at += step) {
    std::memcpy(bytes + at, &pattern, step);
  }
}

// The content of one tensor's memory, guards included, as it is before the call.
class GuardedBuffer {
public:
  GuardedBuffer() = default;
  GuardedBuffer(std::int64_t elements, int element_bytes, bool guarded, Fill fill, bool is_bfloat16)
      : guard_bytes_(guarded ? static_cast<std::size_t>(guard_elements * element_bytes) : 0),
        element_bytes_(element_bytes), is_bfloat16_(is_bfloat16),
        bytes_(static_cast<std::size_t>(elements * element_bytes) + 2 * guard_bytes_) {
    refill(fill);
  }

  void refill(Fill fill) { fill_bytes(bytes_.data(), bytes_.size(), fill, element_bytes_, is_bfloat16_); }

  std::byte* data() { return bytes_.data() + guard_bytes_; }
  const std::byte* data() const { return bytes_.data() + guard_bytes_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::size_t guard_bytes() const { return guard_bytes_; }
  int element_bytes() const { return element_bytes_; }

private:
  std::size_t guard_bytes_ = 0;
  int element_bytes_ = 1;
  bool is_bfloat16_ = false;
  std::vector<std::byte> bytes_;
};

// Where `after` first differs from `before`, in elements from the tensor's first one; empty if nowhere.
inline std::string first_difference(const GuardedBuffer& before, const std::vector<std::byte>& after) {
  for (std::size_t i = 0; i < after.size(); ++i) {
    if (before.bytes()[i] != after[i]) {
      const auto at = static_cast<std::int64_t>(i) - static_cast<std::int64_t>(before.guard_bytes());
      return "element " + std::to_string(at / before.element_bytes());
    }
  }
  return {};
}

} // namespace single_query::test
