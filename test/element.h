// Elements of float32, float16 and bfloat16 as doubles, and back. Written apart from the library's own conversions, so
// that a fault in those cannot hide in the reference.
#pragma once

#include "single_query/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define SINGLE_QUERY_TEST_HOST_DEVICE __host__ __device__
#else
#define SINGLE_QUERY_TEST_HOST_DEVICE
#endif

namespace single_query::test {

struct Format {
  int bytes;
  int precision;      // bits of the significand, the hidden one included
  int least_exponent; // of the smallest subnormal number
  double largest;
};

inline Format format_of(DataType type) {
  switch (type) {
  case DataType::float16:
    return {2, 11, -24, 0x1.ffcp15};
  case DataType::bfloat16:
    return {2, 8, -133, 0x1.fep127};
  case DataType::float32:
    break;
  }
  return {4, 24, -149, 0x1.fffffep127};
}

// u_T: half the distance from 1 to the next number.
inline double unit_roundoff(DataType type) {
  return std::ldexp(1.0, -format_of(type).precision);
}

template <DataType Type>
SINGLE_QUERY_TEST_HOST_DEVICE inline double decode(const void* elements, std::int64_t index) {
  if constexpr (Type == DataType::float32) {
    return static_cast<const float*>(elements)[index];
  } else {
    const std::uint32_t bits = static_cast<const std::uint16_t*>(elements)[index];
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    std::uint32_t wide = bits << 16; // bfloat16 is the upper half of a float32
    float factor = 1;
    if constexpr (Type == DataType::float16) {
      const bool finite = (bits & 0x7c00u) != 0x7c00u;
      wide = sign | (bits & 0x7fffu) << 13 | (finite ? 0u : 0x7f800000u);
      factor = finite ? 0x1p112f : 1.0f; // the exponents' biases differ by 127 - 15
    }
    float value;
    memcpy(&value, &wide, sizeof(value));
    return static_cast<double>(value) * factor;
  }
}

// Call body with the dtype as a compile-time constant.
template <class Body>
auto with_data_type(DataType type, const Body& body) {
  switch (type) {
  case DataType::float16:
    return body(std::integral_constant<DataType, DataType::float16>());
  case DataType::bfloat16:
    return body(std::integral_constant<DataType, DataType::bfloat16>());
  case DataType::float32:
    break;
  }
  return body(std::integral_constant<DataType, DataType::float32>());
}

inline double decode(DataType type, const void* elements, std::int64_t index) {
  return with_data_type(type, [&](auto constant) { return decode<constant.value>(elements, index); });
}

// The bits of the nearest number, ties to even; past the largest number infinity, as IEEE rounds.
inline std::uint32_t encode_bits(DataType type, double value) {
  if (type == DataType::float32) {
    const float rounded = static_cast<float>(value);
    std::uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof(bits));
    return bits;
  }
  const Format format = format_of(type);
  const std::uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
  const std::uint32_t infinity = type == DataType::float16 ? 0x7c00u : 0x7f80u;
  if (std::isnan(value)) {
    return infinity | infinity >> 1; // quiet
  }
  const double magnitude = std::fabs(value);
  if (magnitude == 0 || std::isinf(value)) {
    return sign | (magnitude == 0 ? 0u : infinity);
  }
  int exponent;
  std::frexp(magnitude, &exponent);
  const int step = std::max(exponent - format.precision, format.least_exponent);
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, -step)));
  const auto binade = static_cast<std::uint32_t>(step - format.least_exponent);
  // A significand that rounds up to the next power of two carries into the exponent by itself.
  return sign | std::min((binade << (format.precision - 1)) + units, infinity);
}

inline void encode(DataType type, void* elements, std::int64_t index, double value) {
  const std::uint32_t bits = encode_bits(type, value);
  const auto bytes = static_cast<std::size_t>(format_of(type).bytes);
  std::memcpy(static_cast<std::byte*>(elements) + static_cast<std::size_t>(index) * bytes, &bits,
              bytes); // little endian
}

inline double rounded(DataType type, double value) {
  std::uint32_t bits = encode_bits(type, value);
  return decode(type, &bits, 0);
}

} // namespace single_query::test
