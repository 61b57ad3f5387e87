#include "torch_checks.h"

#include <ATen/core/grad_mode.h>

namespace single_query {
namespace {

// Tensors without elements may have a null pointer, which the raw interface takes for an absent argument.
alignas(256) char no_elements[256];

} // namespace

const void* address(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? no_elements : tensor.const_data_ptr();
}

void* output_address(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? no_elements : tensor.mutable_data_ptr();
}

// An axis of one element (or none) may have any stride, which then means nothing.
std::int64_t axis_stride(const at::Tensor& tensor, std::int64_t axis) {
  const auto index = static_cast<std::size_t>(axis);
  return tensor.sizes()[index] > 1 ? tensor.strides()[index] : 0;
}

std::int64_t axis_size(const at::Tensor& tensor, std::int64_t axis) {
  return tensor.sizes()[static_cast<std::size_t>(axis)];
}

DataType data_type(at::ScalarType type) {
  return type == at::kHalf ? DataType::float16 : type == at::kBFloat16 ? DataType::bfloat16 : DataType::float32;
}

void check_defined(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), name, " is an undefined tensor");
  TORCH_CHECK(tensor.layout() == at::kStrided, name, " has layout ", tensor.layout(), ": it must be Strided");
  TORCH_CHECK(
      !(tensor.requires_grad() && at::GradMode::is_enabled()), name,
      " requires grad while grad mode is on: single_query has no backward pass: detach it or turn grad mode off");
}

void check_floating(const char* name, const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, name, " has dtype ", type,
              ": it must be Float, Half or BFloat16");
}

void check_same_device(const char* name, const at::Tensor& tensor, const char* other_name, const at::Tensor& other) {
  TORCH_CHECK(tensor.device() == other.device(), name, " is on ", tensor.device(), ": it must be on the device of ",
              other_name, ", ", other.device());
}

void check_axes(const char* name, const at::Tensor& tensor, std::int64_t axes, const char* why) {
  TORCH_CHECK(tensor.dim() == axes, name, " has ", tensor.dim(), " axes: it must have ", axes, " (", why, ")");
}

void check_last_axis_contiguous(const char* name, const at::Tensor& tensor) {
  const std::int64_t stride = axis_stride(tensor, tensor.dim() - 1);
  TORCH_CHECK(stride == 1 || axis_size(tensor, tensor.dim() - 1) <= 1, name, " has stride ", stride,
              " in its last axis, head_dim: it must be contiguous there (stride 1)");
}

} // namespace single_query
