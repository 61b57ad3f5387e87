// The inner functions of the host twins for any processor: vectors of four or eight floats in whatever it has.
#include "host_kernels_cpu.h"

namespace single_query {
namespace {

#if defined(__aarch64__)
constexpr int lanes = 8; // two registers each of its 32: enough sums in flight
#else
constexpr int lanes = 4;
#endif
using Vector = float __attribute__((vector_size(4 * lanes)));
using Words = std::uint32_t __attribute__((vector_size(4 * lanes)));

template <typename Element>
inline Words widened_bits(const Element* from) {
  static_assert(sizeof(Element) == 2);
  std::uint16_t bits[lanes];
  std::memcpy(bits, from, sizeof(bits));
  Words words;
  for (int i = 0; i < lanes; ++i) {
    words[i] = bits[i];
  }
  return words;
}

inline Vector load(const __nv_bfloat16* from) {
  return reinterpret_cast<Vector>(widened_bits(from) << 16);
}

// Exponent and fraction move to their places in a float, where the exponent is too small by 127 - 15: subnormals come
// out right too. Infinity and NaN get the largest exponent.
inline Vector load(const __half* from) {
  const Words half = widened_bits(from);
  const Words magnitude = (half & 0x7fff) << 13;
  const Words finite = reinterpret_cast<Words>(reinterpret_cast<Vector>(magnitude) * 0x1p112f);
  const Words sign = (half & 0x8000) << 16;
  return reinterpret_cast<Vector>(sign | ((half & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite));
}

inline void store(__half* to, const Vector& x) {
  for (int i = 0; i < lanes; ++i) {
    to[i] = __float2half_rn(x[i]);
  }
}

inline void sum_lanes(const Vector (&sums)[8], float (&result)[8]) {
  for (int i = 0; i < 8; ++i) {
    float lane[lanes];
    std::memcpy(lane, &sums[i], sizeof(lane));
    for (int width = lanes / 2; width > 0; width /= 2) {
      for (int j = 0; j < width; ++j) {
        lane[j] += lane[j + width];
      }
    }
    result[i] = lane[0];
  }
}

} // namespace
} // namespace single_query

#include "task_cpu.h"

namespace single_query {
const HostKernels baseline_host_kernels = {attend, merge_partials, merge_parts};
}
