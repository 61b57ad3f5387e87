// The main job: attention on random tensors by the raw interface, checked against LibTorch's matmul and softmax.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

// Shapes: query [batch, heads, dim], key and value [batch, kv_heads, keys, dim].
struct RunOptions {
  std::int64_t keys = 64; // 0 or more
  std::int64_t dim = 32;
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  c10::ScalarType dtype = c10::ScalarType::Float; // Float, Half or BFloat16
  c10::Device device = c10::DeviceType::CUDA;
  std::uint64_t seed = 0;
};

// Returns torch::allclose of the two; device, path and largest error go to standard error. Throws std::exception where
// nothing could be compared: a bad option, no such device, a CUDA failure.
bool run(const RunOptions& options);

// float32, one query: on the GPU, or on the CPU where there is none.
bool run(std::int64_t N = 64, std::int64_t D = 32);

// A CUDA device where there is one, else the CPU, which standard error is told.
c10::Device default_device();

// Throws std::runtime_error with the reason if CUDA cannot be used.
void require_cuda();
