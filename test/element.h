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
  constexpr std::int64_t bytes = Type == DataType::float32 ? 4 : 2;
  std::uint32_t bits = 0;
  memcpy(&bits, static_cast<const char*>(elements) + index * bytes, bytes); // little endian
  float factor = 1;
  if constexpr (Type == DataType::bfloat16) {
    bits <<= 16; // the upper half of a float32
  } else if constexpr (Type == DataType::float16) {
    const bool finite = (bits & 0x7c00u) != 0x7c00u;
    factor = finite ? 0x1p112f : 1.0f; // the exponents' biases differ by 127 - 15
    bits = (bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13 | (finite ? 0u : 0x7f800000u);
  }
  float value;
  memcpy(&value, &bits, sizeof(value));
  return static_cast<double>(value) * factor;
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
  if (std::ilogb(magnitude) < format.least_exponent + format.precision - 1) { // subnormal: a multiple of the least one
    return sign | static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, -format.least_exponent)));
  }
  // Round the double's own bits, then take the difference of the biases from the exponent. A significand that rounds up
  // to the next power of two carries into the exponent by itself.
  std::uint64_t bits;
  std::memcpy(&bits, &magnitude, sizeof(bits));
  const int dropped = 53 - format.precision;
  bits += (std::uint64_t{1} << (dropped - 1)) - 1 + (bits >> dropped & 1);
  const int bias = 1 - (format.least_exponent + format.precision - 1);
  const std::uint64_t shifted = (bits >> dropped) - (static_cast<std::uint64_t>(1023 - bias) << (format.precision - 1));
  return sign | static_cast<std::uint32_t>(std::min<std::uint64_t>(shifted, infinity));
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
