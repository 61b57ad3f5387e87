// The inner functions of the host twins for AVX-512 F, BW, DQ and VL (x86-64-v4).
#include "host_kernels_cpu.h"

#if defined(__x86_64__)

#include <immintrin.h>

// What follows is compiled for the instruction set; what is included above is not, since inline functions of headers
// may end up serving the whole program.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))),              \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "lane_sums_x86_cpu.h"

namespace single_query {
namespace {

constexpr int lanes = 16;
using Vector = float __attribute__((vector_size(4 * lanes)));

// The forms with a mask of ones instead of the plain ones, which GCC 12 says to read an uninitialised register.
constexpr __mmask16 all_lanes = 0xffff;

inline Vector load(const __half* from) {
  return _mm512_maskz_cvtph_ps(all_lanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline Vector load(const __nv_bfloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(all_lanes, _mm512_maskz_cvtepu16_epi32(all_lanes, bits), 16));
}

inline void store(__half* to, const Vector& x) {
  const __m256i halves = _mm512_maskz_cvtps_ph(all_lanes, x, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

inline void sum_lanes(const Vector (&sums)[8], float (&result)[8]) {
  __m256 halves[8];
  for (int i = 0; i < 8; ++i) {
    __m256 parts[2];
    std::memcpy(parts, &sums[i], sizeof(parts));
    halves[i] = _mm256_add_ps(parts[0], parts[1]);
  }
  _mm256_storeu_ps(result, sums_of_eight(halves));
}

} // namespace
} // namespace single_query

#include "task_cpu.h"

namespace single_query {
const HostKernels avx512_host_kernels = {attend, merge_partials, merge_parts};
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
