#include "torch_arguments.h"
#include "torch_checks.h"

#include <array>

namespace single_query {
namespace {

// The axes between the first (parts) and, in `outputs`, the last (head_dim), as two axes that both tensors can express.
struct MiddleAxis {
  std::int64_t size = 1;
  std::int64_t outputs_stride = 0;
  std::int64_t lse_stride = 0;
};

std::array<MiddleAxis, 2> middle_axes(const at::Tensor& outputs, const at::Tensor& lse) {
  std::array<MiddleAxis, 2> axes; // batch, head
  std::size_t inner = 1;
  for (std::int64_t axis = lse.dim() - 1; axis > 0; --axis) {
    const MiddleAxis next{axis_size(lse, axis), axis_stride(outputs, axis), axis_stride(lse, axis)};
    if (next.size == 1) {
      continue;
    }
    MiddleAxis& last = axes[inner];
    const bool continues =
        next.outputs_stride == last.size * last.outputs_stride && next.lse_stride == last.size * last.lse_stride;
    if (last.size == 1) {
      last = next;
    } else if (continues || next.size == 0 || last.size == 0) {
      last.size *= next.size;
    } else {
      TORCH_CHECK(inner == 1, "outputs has shape ", outputs.sizes(), " and strides ", outputs.strides(),
                  " and lse has strides ", lse.strides(),
                  ": the axes between the first and head_dim must collapse to at most two strides in both");
      axes[--inner] = next;
    }
  }
  return axes;
}

} // namespace

void check_merge_types(const at::Tensor& outputs, const at::Tensor& lse) {
  check_defined("outputs", outputs);
  check_defined("lse", lse);
  check_floating("outputs", outputs);
  TORCH_CHECK(lse.scalar_type() == at::kFloat, "lse has dtype ", lse.scalar_type(), ": it must be Float");
  check_same_device("lse", lse, "outputs", outputs);
  TORCH_CHECK(outputs.dim() >= 2, "outputs has ", outputs.dim(), " axes: it must be [P, ..., D], 2 or more");
  check_axes("lse", lse, outputs.dim() - 1, "those of outputs without head_dim");
}

MergeProblem merge_problem(const at::Tensor& outputs, const at::Tensor& lse, Pointers pointers) {
  check_merge_types(outputs, lse);
  TORCH_CHECK(lse.sizes() == outputs.sizes().slice(0, static_cast<std::size_t>(lse.dim())), "lse has shape ",
              lse.sizes(), ": it must be that of outputs without head_dim; outputs has ", outputs.sizes());
  check_last_axis_contiguous("outputs", outputs);
  const auto [batch, head] = middle_axes(outputs, lse);
  MergeProblem problem;
  problem.dtype = data_type(outputs.scalar_type());
  problem.parts = axis_size(outputs, 0);
  problem.batch = batch.size;
  problem.heads = head.size;
  problem.head_dim = axis_size(outputs, outputs.dim() - 1);
  problem.outputs_stride_part = axis_stride(outputs, 0);
  problem.outputs_stride_batch = batch.outputs_stride;
  problem.outputs_stride_head = head.outputs_stride;
  problem.lse_stride_part = axis_stride(lse, 0);
  problem.lse_stride_batch = batch.lse_stride;
  problem.lse_stride_head = head.lse_stride;
  if (pointers == Pointers::yes) {
    problem.outputs = address(outputs);
    problem.lse = static_cast<const float*>(address(lse));
  }
  return problem;
}

void set_dense_outputs(MergeProblem& problem, const at::Tensor& output, const at::Tensor& output_lse) {
  problem.output = output_address(output);
  problem.output_stride_batch = problem.heads * problem.head_dim;
  problem.output_stride_head = problem.head_dim;
  problem.output_lse = static_cast<float*>(output_address(output_lse));
  problem.output_lse_stride_batch = problem.heads;
  problem.output_lse_stride_head = 1;
}

} // namespace single_query
