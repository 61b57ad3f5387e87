// Between float and the storage types, in the units the kernels work with.
#pragma once

#include "softmax_state.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace single_query {

// The power of two that values are accumulated with, see softmax_state.h.
__device__ __forceinline__ float value_scale(bool half) {
  return half ? float16_value_scale : wide_value_scale;
}

// exp(x) for x <= 0, -inf or NaN, good enough for weights that will be rounded to 16 bits; 0 below 2^-126.
__device__ __forceinline__ float fast_exp(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
  return power;
}

template <typename Scalar>
__device__ __forceinline__ Scalar from_float(float x) {
  if constexpr (std::is_same_v<Scalar, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<Scalar, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

template <typename Scalar>
__device__ __forceinline__ float to_float(Scalar x) {
  return static_cast<float>(x);
}

// destination[0 .. min(count, 4) - 1] = values; in one store if `vectors` allows (then count is at least 4).
template <typename Scalar>
__device__ __forceinline__ void store_four(Scalar* destination, const float (&values)[4], int count, bool vectors) {
  Scalar converted[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    converted[i] = from_float<Scalar>(values[i]);
  }
  using Vector = std::conditional_t<sizeof(Scalar) == 4, float4, float2>;
  static_assert(sizeof(Vector) == sizeof(converted));
  if (vectors) {
    Vector packed;
    memcpy(&packed, converted, sizeof(packed));
    *reinterpret_cast<Vector*>(destination) = packed;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) {
      destination[i] = converted[i];
    }
  }
}

} // namespace single_query
