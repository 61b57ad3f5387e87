// The inner functions of the host twins for AVX2, FMA and F16C (x86-64-v3).
#include "host_kernels_cpu.h"

#if defined(__x86_64__)

#include <immintrin.h>

// What follows is compiled for the instruction set; what is included above is not, since inline functions of headers
// may end up serving the whole program.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "lane_sums_x86_cpu.h"

namespace single_query {
namespace {

constexpr int lanes = 8;
using Vector = float __attribute__((vector_size(4 * lanes)));

inline Vector load(const __half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline Vector load(const __nv_bfloat16* from) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

inline void store(__half* to, const Vector& x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

inline void sum_lanes(const Vector (&sums)[8], float (&result)[8]) {
  _mm256_storeu_ps(result, sums_of_eight({sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]}));
}

} // namespace
} // namespace single_query

#include "task_cpu.h"

namespace single_query {
const HostKernels avx2_host_kernels = {attend, merge_partials, merge_parts};
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
