// Elements of attn_mask as numbers that are added to scores. Host and device.
#pragma once

#include "single_query/attention.h"
#include "softmax_state.h"

#include <cuda_bf16.h> // cuda_fp16.h names its type
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace single_query {

// Element `at` of attn_mask as it is stored, zeros above it. There has to be a mask.
SINGLE_QUERY_HOST_DEVICE std::uint32_t mask_bits(const AttentionProblem& problem, std::int64_t at) {
  switch (problem.mask_type) {
  case MaskType::float32:
    return static_cast<const std::uint32_t*>(problem.attn_mask)[at];
  case MaskType::float16:
  case MaskType::bfloat16:
    return static_cast<const std::uint16_t*>(problem.attn_mask)[at];
  default: // boolean
    return static_cast<const unsigned char*>(problem.attn_mask)[at];
  }
}

SINGLE_QUERY_HOST_DEVICE float float_of_bits(std::uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

// What an element adds to its score: -inf excludes the key.
SINGLE_QUERY_HOST_DEVICE float mask_number(MaskType type, std::uint32_t bits) {
  switch (type) {
  case MaskType::float32:
    return float_of_bits(bits);
  case MaskType::float16:
    return __half2float(__half(__half_raw{static_cast<std::uint16_t>(bits)}));
  case MaskType::bfloat16:
    return float_of_bits(bits << 16);
  default: // boolean
    return bits != 0 ? 0.0f : negative_infinity;
  }
}

// What attn_mask adds to the score of (batch, query_head, key). 0 where there is no mask.
SINGLE_QUERY_HOST_DEVICE float mask_value(const AttentionProblem& problem, std::int64_t batch, std::int64_t query_head,
                                          std::int64_t key) {
  if (problem.attn_mask == nullptr) {
    return 0;
  }
  const std::int64_t at =
      batch * problem.mask_stride_batch + query_head * problem.mask_stride_head + key * problem.mask_stride_key;
  return mask_number(problem.mask_type, mask_bits(problem, at));
}

} // namespace single_query
