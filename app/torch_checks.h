// What every argument of the LibTorch layer is asked, by name. Each check throws c10::Error with the argument's name,
// what it was, and what is allowed.
#pragma once

#include "single_query/attention.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace single_query {

// The tensor's data; never null, which the raw interface takes for an absent argument.
const void* address(const at::Tensor& tensor);
void* output_address(const at::Tensor& tensor);

std::int64_t axis_size(const at::Tensor& tensor, std::int64_t axis);

// 0 for an axis of one element (or none), whose stride may be anything and means nothing.
std::int64_t axis_stride(const at::Tensor& tensor, std::int64_t axis);

// The raw interface's name for a type that check_floating() allows.
DataType data_type(at::ScalarType type);

// Defined, strided, and in no need of a gradient.
void check_defined(const char* name, const at::Tensor& tensor);
void check_floating(const char* name, const at::Tensor& tensor);
void check_same_device(const char* name, const at::Tensor& tensor, const char* other_name, const at::Tensor& other);
void check_axes(const char* name, const at::Tensor& tensor, std::int64_t axes, const char* why);
void check_last_axis_contiguous(const char* name, const at::Tensor& tensor);

} // namespace single_query
