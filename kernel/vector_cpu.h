// Vectors of `lanes` floats: what needs no instruction of its own. Included by the one source of each instruction set,
// after the set's own `lanes`, `Vector`, `load`, `store` and `sum_lanes`. Everything has internal linkage, so that what
// was compiled for one set can never stand in for another's.
#pragma once

#include "host_kernels_cpu.h"

namespace single_query {
namespace {

using Unsigned = std::uint32_t __attribute__((vector_size(4 * lanes)));

inline Vector broadcast(float x) {
  return x - Vector{};
}

inline Vector load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline void store(float* to, const Vector& x) {
  std::memcpy(to, &x, sizeof(x));
}

// Rounds to nearest even; a NaN stays one.
inline void store(__nv_bfloat16* to, const Vector& x) {
  using Halves = std::uint16_t __attribute__((vector_size(2 * lanes)));
  const Unsigned bits = reinterpret_cast<Unsigned>(x);
  const Unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector(x == x ? rounded : bits >> 16 | 0x40, Halves);
  std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
}

// One by one, where `= {}` becomes a call or a string instruction that costs more than the sums.
template <int count>
inline void clear(Vector (&sums)[count]) {
  for (int i = 0; i < count; ++i) {
    sums[i] = Vector{};
  }
}

// exp(x) for x <= 0 and NaN, to 1 ulp; 0 below exp(-87), which no sum with a 1 in it can feel.
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by its Taylor polynomial, whose remainder is r^8 / 8! < 6e-9.
inline Vector exp_of_nonpositive(const Vector& x) {
  constexpr float shift = 0x1.8p23f; // adding it rounds to an integer, which stands in the low bits of the sum
  constexpr float log2_e = 0x1.715476p0f;
  constexpr float ln2_high = 0x1.62ep-1f; // times any n exact
  constexpr float ln2_low = 0x1.0bfbe8p-15f;
  const Vector shifted = x * log2_e + shift;
  const Vector n = shifted - shift;
  const Vector r = (x - n * ln2_high) - n * ln2_low;
  Vector sum = broadcast(1.0f / 5040);
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const Unsigned power_bits = (reinterpret_cast<Unsigned>(shifted) + 127) << 23;
  const Vector result = sum * reinterpret_cast<Vector>(power_bits);
  return x < -87.0f ? Vector{} : result;
}

// The larger of the two; `x` is passed over where it is NaN.
inline Vector larger(const Vector& max, const Vector& x) {
  return x > max ? x : max;
}

inline float largest_lane(const Vector& x) {
  float largest = x[0];
  for (int i = 1; i < lanes; ++i) {
    largest = x[i] > largest ? x[i] : largest;
  }
  return largest;
}

inline float sum_of_lanes(const Vector& x) {
  float sums[lanes];
  store(sums, x);
  for (int width = lanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      sums[i] += sums[i + width];
    }
  }
  return sums[0];
}

// `count` elements to or from floats.
template <typename Element>
inline void widen(const Element* from, int count, float* to) {
  int i = 0;
  for (; i + lanes <= count; i += lanes) {
    store(to + i, load(from + i));
  }
  for (; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

inline void narrow(float from, float* to) {
  *to = from;
}
inline void narrow(float from, __half* to) {
  *to = __float2half_rn(from);
}
inline void narrow(float from, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(from);
}

template <typename Element>
inline void narrow(const float* from, int count, Element* to) {
  int i = 0;
  for (; i + lanes <= count; i += lanes) {
    store(to + i, load(from + i));
  }
  for (; i < count; ++i) {
    narrow(from[i], to + i);
  }
}

} // namespace
} // namespace single_query
