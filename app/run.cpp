#include "run.h"

#include "single_query/attention.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <cmath>
#include <iostream>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Inputs {
  torch::Tensor query; // [batch, heads, dim]
  torch::Tensor key;   // [batch, kv_heads, keys, dim]
  torch::Tensor value; // [batch, kv_heads, keys, dim]
};

Inputs random_inputs(const RunOptions& options) {
  torch::manual_seed(options.seed);
  const auto type = torch::dtype(options.dtype).device(options.device);
  const std::vector<std::int64_t> cache = {options.batch, options.kv_heads, options.keys, options.dim};
  return {torch::randn({options.batch, options.heads, options.dim}, type), torch::randn(cache, type),
          torch::randn(cache, type)};
}

single_query::DataType data_type(c10::ScalarType type) {
  switch (type) {
  case torch::kFloat:
    return single_query::DataType::float32;
  case torch::kHalf:
    return single_query::DataType::float16;
  case torch::kBFloat16:
    return single_query::DataType::bfloat16;
  default:
    throw std::invalid_argument(std::string("dtype is ") + c10::toString(type) +
                                ": it must be Float, Half or BFloat16");
  }
}

// The raw interface: pointers in, results out. Scratch memory is the caller's.
torch::Tensor attention(const RunOptions& options, const Inputs& inputs) {
  torch::Tensor output = torch::full_like(inputs.query, std::nan("")); // what is not written shows
  single_query::AttentionProblem problem = single_query::contiguous_problem(
      data_type(options.dtype), options.batch, options.heads, options.kv_heads, options.keys, options.dim);
  problem.query = inputs.query.const_data_ptr();
  problem.key = inputs.key.const_data_ptr();
  problem.value = inputs.value.const_data_ptr();
  problem.output = output.mutable_data_ptr();
  const auto scratch = [&](std::size_t bytes) {
    return torch::zeros(static_cast<std::int64_t>(bytes), torch::dtype(torch::kByte).device(options.device));
  };
  if (options.device.is_cuda()) {
    const std::size_t bytes = single_query::attention_workspace_bytes(problem);
    const torch::Tensor workspace = scratch(bytes);
    single_query::attention(problem, workspace.data_ptr(), bytes, c10::cuda::getCurrentCUDAStream());
  } else {
    const std::size_t bytes = single_query::attention_on_host_workspace_bytes(problem);
    single_query::attention_on_host(problem, scratch(bytes).data_ptr(), bytes);
  }
  return output;
}

// LibTorch's matmul and softmax, in double: what is compared is this library's error alone, and no TF32 comes into it.
torch::Tensor expected_output(const RunOptions& options, const Inputs& inputs) {
  const auto wide = [](const torch::Tensor& tensor) { return tensor.to(torch::kDouble); };
  const std::int64_t group = options.heads / options.kv_heads;
  const torch::Tensor query = wide(inputs.query).view({options.batch, options.kv_heads, group, options.dim});
  const double scale = 1 / std::sqrt(static_cast<double>(options.dim));
  const torch::Tensor scores = torch::matmul(query, wide(inputs.key).transpose(-2, -1)) * scale; // [B, Hkv, group, N]
  return torch::matmul(torch::softmax(scores, -1), wide(inputs.value)).view(inputs.query.sizes());
}

struct Tolerance {
  double relative;
  double absolute;
};

// With u the unit roundoff of float32, which all arithmetic is in, and u_T that of the dtype:
// - relative: the result is rounded to the dtype, u_T; twice that.
// - absolute: scores are off by about u times their largest term sum, the sum over N keys by about u 2 log2 N, the
//   exponentials and the division by a few u, all of it relative to the largest value; where the dtype has 16 bits the
//   weights may be rounded to it before the product with the values, u_T.
Tolerance tolerance(const RunOptions& options, const Inputs& inputs) {
  const double u = std::ldexp(1.0, -24);
  const double u_dtype = options.dtype == torch::kFloat  ? u
                         : options.dtype == torch::kHalf ? std::ldexp(1.0, -11)
                                                         : std::ldexp(1.0, -8);
  if (options.keys == 0) {
    return {0, 0};
  }
  const auto longest = [](const torch::Tensor& rows) {
    return rows.norm(2, {-1}, false, torch::kFloat).max().item<double>();
  };
  const double largest_score =
      longest(inputs.query) * longest(inputs.key) / std::sqrt(static_cast<double>(options.dim));
  const double largest_value = inputs.value.abs().max().item<double>();
  const double rounding = u * (8 + 2 * std::log2(static_cast<double>(options.keys)) + largest_score);
  return {2 * u_dtype, largest_value * (rounding + (options.dtype == torch::kFloat ? 0 : u_dtype))};
}

void check(const RunOptions& options) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) {
      throw std::invalid_argument(message);
    }
  };
  const auto within = [&](const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    require(value >= least && value <= most, std::string(name) + " is " + std::to_string(value) + ": it must be " +
                                                 std::to_string(least) + " .. " + std::to_string(most));
  };
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  within("keys", options.keys, 0, most);
  within("dim", options.dim, 1, single_query::max_head_dim);
  within("batch", options.batch, 1, most); // with none nothing would be compared
  within("heads", options.heads, 1, most);
  within("kv_heads", options.kv_heads, 1, most);
  require(options.heads % options.kv_heads == 0, "heads is " + std::to_string(options.heads) +
                                                     ": it must be a multiple of kv_heads, " +
                                                     std::to_string(options.kv_heads));
  require(options.device.is_cuda() || options.device.is_cpu(),
          "device is " + options.device.str() + ": it must be cpu, cuda or cuda:<index>");
  if (options.device.is_cuda()) {
    require_cuda();
    const c10::DeviceIndex count = c10::cuda::device_count();
    require(options.device.index() < count,
            "device is " + options.device.str() + ": there are " + std::to_string(count) + " CUDA devices");
  }
}

} // namespace

void require_cuda() {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) {
    throw std::runtime_error("no CUDA device: the NVIDIA driver is not installed (or not visible to this process)");
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    throw std::runtime_error(std::string("no CUDA device: a driver for CUDA ") + std::to_string(driver / 1000) + "." +
                             std::to_string(driver % 1000 / 10) + " is installed, but " + cudaGetErrorName(error) +
                             ": " + cudaGetErrorString(error));
  }
}

c10::Device default_device() {
  if (torch::cuda::is_available()) {
    return c10::DeviceType::CUDA;
  }
  std::cerr << "There is no CUDA device: running on the CPU.\n";
  return c10::DeviceType::CPU;
}

bool run(const RunOptions& options) {
  check(options);
  const torch::InferenceMode inference;
  c10::cuda::OptionalCUDAGuard guard;
  if (options.device.is_cuda() && options.device.has_index()) {
    guard.set_device(options.device);
  }
  const Inputs inputs = random_inputs(options);
  const torch::Tensor output = attention(options, inputs).to(torch::kDouble);
  const torch::Tensor expected = expected_output(options, inputs);
  const Tolerance allowed = tolerance(options, inputs);
  const bool close = torch::allclose(output, expected, allowed.relative, allowed.absolute);

  std::cerr << "device: " << options.device;
  if (options.device.is_cuda()) {
    std::cerr << " (" << at::cuda::getCurrentDeviceProperties()->name << "), path: CUDA kernel\n";
  } else {
    std::cerr << ", path: host twin\n";
  }
  std::cerr << "largest error: " << (output - expected).abs().max().item<double>() << ", allowed: " << allowed.absolute
            << " + " << allowed.relative << " * |expected|\n";
  return close;
}

bool run(std::int64_t N, std::int64_t D) {
  RunOptions options;
  options.keys = N;
  options.dim = D;
  options.device = default_device();
  return run(options);
}
