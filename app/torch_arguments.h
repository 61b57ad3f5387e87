// From tensors to the raw interface: the checks that only LibTorch's knowledge allows (dtypes, devices, axes), and the
// sizes, strides and pointers of a problem. What a value may be is the raw interface's to check.
#pragma once

#include "single_query/attention.h"
#include "single_query/torch.h"

namespace single_query {

// Fake tensors have sizes and strides, but no data.
enum class Pointers { no, yes };

// Everything of the problem but its outputs. Throws c10::Error naming the argument.
AttentionProblem attention_problem(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const AttentionOptions& options, Pointers pointers);

// Checks `out` against the query and makes it the problem's output.
void set_output(AttentionProblem& problem, const at::Tensor& out, const at::Tensor& query, Pointers pointers);

// Makes `output`, dense and of the query's shape, the problem's output; and `lse`, dense without D, its lse.
void set_dense_output(AttentionProblem& problem, const at::Tensor& output);
void set_dense_lse(AttentionProblem& problem, const at::Tensor& lse);

// The same for merge().
MergeProblem merge_problem(const at::Tensor& outputs, const at::Tensor& lse, Pointers pointers);
void set_dense_outputs(MergeProblem& problem, const at::Tensor& output, const at::Tensor& output_lse);

// What can be said of tensors whose sizes are symbols (torch.export): dtypes, devices and axes, no sizes.
void check_attention_types(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options);
void check_out_type(const at::Tensor& out, const at::Tensor& query);
void check_merge_types(const at::Tensor& outputs, const at::Tensor& lse);

} // namespace single_query
