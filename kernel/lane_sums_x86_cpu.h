// The sums over the lanes of eight vectors at once, for the sources of AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

namespace single_query {
namespace {

// Lane i: the sum over the lanes of sums[i].
inline __m256 sums_of_eight(const __m256 (&sums)[8]) {
  __m256 pairs[4]; // lanes 2j and 2j + 1 of each half: two partial sums each of sums[2i] and sums[2i + 1]
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm256_add_ps(_mm256_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                             _mm256_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
  }
  __m256 halves[2]; // lane j of each half: its sum of sums[4i + j]
  for (int i = 0; i < 2; ++i) {
    halves[i] = _mm256_add_ps(_mm256_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                              _mm256_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(halves[0], halves[1], 0x20),
                       _mm256_permute2f128_ps(halves[0], halves[1], 0x31));
}

} // namespace
} // namespace single_query
