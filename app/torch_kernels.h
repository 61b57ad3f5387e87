// What the operators do with real tensors; CPU and CUDA alike, chosen by the device of the first argument.
#pragma once

#include "single_query/torch.h"

namespace single_query {

at::Tensor attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const AttentionOptions& options);
at::Tensor& attention_out_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const AttentionOptions& options, at::Tensor& out);
std::tuple<at::Tensor, at::Tensor> attention_with_lse_kernel(const at::Tensor& query, const at::Tensor& key,
                                                             const at::Tensor& value, const AttentionOptions& options);
std::tuple<at::Tensor, at::Tensor> merge_kernel(const at::Tensor& outputs, const at::Tensor& lse);

} // namespace single_query
