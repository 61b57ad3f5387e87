#include "torch_kernels.h"

#include "torch_arguments.h"
#include "torch_checks.h"
#include "torch_workspace.h"

#include <ATen/Config.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <optional>
#include <string>
#include <string_view>

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#warning "without OpenMP this file's at::parallel_for is a serial loop"
#endif

namespace single_query {
namespace {

const ParallelFor torch_parallel_for = [](std::int64_t tasks, const auto& body) {
  at::parallel_for(0, tasks, 1, body);
};

// Where the work goes: `device` is current while this lives, if it is a CUDA device.
struct Place {
  Place(const char* name, const at::Tensor& tensor) : device(tensor.device()) {
    TORCH_CHECK(device.is_cuda() || device.is_cpu(), name, " is on ", device,
                ": it must be on a CUDA device or the CPU");
    if (device.is_cuda()) {
      guard.set_device(device);
    }
  }
  c10::cuda::CUDAStream stream() const { return c10::cuda::getCurrentCUDAStream(device.index()); }

  at::Device device;
  c10::cuda::OptionalCUDAGuard guard;
};

// Dense, not initialised. Not at::empty, which is a call through the dispatcher.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, const Place& place) {
  return at::Tensor(place.device.is_cuda() ? at::detail::empty_cuda(sizes, type, place.device, std::nullopt)
                                           : at::detail::empty_cpu(sizes, type));
}

// An error of the raw interface becomes LibTorch's, with the same message but for the caller's name of the output.
template <typename Body>
void with_torch_errors(const char* output_name, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    constexpr std::string_view raw_name = " output is ";
    std::string message = error.what();
    if (const std::size_t at = message.find(raw_name); at != std::string::npos) {
      message.replace(at, raw_name.size(), std::string(" ") + output_name + " is ");
    }
    TORCH_CHECK(false, message);
  }
}

void compute(const AttentionProblem& problem, const Place& place, const char* output_name = "output") {
  with_torch_errors(output_name, [&] {
    if (place.device.is_cuda()) {
      const std::size_t bytes = attention_workspace_bytes(problem);
      const c10::cuda::CUDAStream stream = place.stream();
      const Workspace workspace = bytes > 0 ? cuda_workspace(stream, bytes) : Workspace{};
      attention(problem, workspace.data, workspace.bytes, stream);
    } else {
      const std::size_t bytes = attention_on_host_workspace_bytes(problem);
      const c10::DataPtr workspace = bytes > 0 ? c10::GetCPUAllocator()->allocate(bytes) : c10::DataPtr();
      attention_on_host(problem, workspace.get(), bytes, torch_parallel_for);
    }
  });
}

} // namespace

at::Tensor attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const AttentionOptions& options) {
  AttentionProblem problem = attention_problem(query, key, value, options, Pointers::yes);
  const Place place("query", query);
  at::Tensor output = empty(query.sizes(), query.scalar_type(), place);
  set_dense_output(problem, output);
  compute(problem, place);
  return output;
}

at::Tensor& attention_out_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const AttentionOptions& options, at::Tensor& out) {
  AttentionProblem problem = attention_problem(query, key, value, options, Pointers::yes);
  set_output(problem, out, query, Pointers::yes);
  compute(problem, Place("query", query), "out");
  if (!out.is_inference()) {
    out.unsafeGetTensorImpl()->bump_version(); // autograd may have saved what was just overwritten
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse_kernel(const at::Tensor& query, const at::Tensor& key,
                                                             const at::Tensor& value, const AttentionOptions& options) {
  AttentionProblem problem = attention_problem(query, key, value, options, Pointers::yes);
  const Place place("query", query);
  at::Tensor output = empty(query.sizes(), query.scalar_type(), place);
  at::Tensor lse = empty(query.sizes().slice(0, static_cast<std::size_t>(query.dim() - 1)), at::kFloat, place);
  set_dense_output(problem, output);
  set_dense_lse(problem, lse);
  compute(problem, place);
  return {std::move(output), std::move(lse)};
}

std::tuple<at::Tensor, at::Tensor> merge_kernel(const at::Tensor& outputs, const at::Tensor& lse) {
  MergeProblem problem = merge_problem(outputs, lse, Pointers::yes);
  const Place place("outputs", outputs);
  at::Tensor output = empty(outputs.sizes().slice(1), outputs.scalar_type(), place);
  at::Tensor output_lse = empty(lse.sizes().slice(1), at::kFloat, place);
  set_dense_outputs(problem, output, output_lse);
  with_torch_errors("output", [&] {
    if (place.device.is_cuda()) {
      merge(problem, place.stream());
    } else {
      merge_on_host(problem, torch_parallel_for);
    }
  });
  return {std::move(output), std::move(output_lse)};
}

} // namespace single_query
