// Elements of attn_mask as numbers that are added to scores. Host and device.
#pragma once

#include "single_query/attention.h"
#include "softmax_state.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace single_query {

// What attn_mask adds to the score of (batch, query_head, key): -inf excludes the key. 0 where there is no mask.
SINGLE_QUERY_HOST_DEVICE float mask_value(const AttentionProblem& problem, std::int64_t batch, std::int64_t query_head,
                                          std::int64_t key) {
  if (problem.attn_mask == nullptr) {
    return 0;
  }
  const std::int64_t at =
      batch * problem.mask_stride_batch + query_head * problem.mask_stride_head + key * problem.mask_stride_key;
  switch (problem.mask_type) {
  case MaskType::float32:
    return static_cast<const float*>(problem.attn_mask)[at];
  case MaskType::float16:
    return __half2float(static_cast<const __half*>(problem.attn_mask)[at]);
  case MaskType::bfloat16:
    return __bfloat162float(static_cast<const __nv_bfloat16*>(problem.attn_mask)[at]);
  default: // boolean
    return static_cast<const unsigned char*>(problem.attn_mask)[at] != 0 ? 0.0f : negative_infinity;
  }
}

} // namespace single_query
