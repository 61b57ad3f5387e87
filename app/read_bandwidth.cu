#include "read_bandwidth.h"

namespace single_query::benchmark {
namespace {

constexpr int loads_in_flight = 4; // from each array, a thread

__global__ void empty_kernel() {}

__device__ uint4 operator^(uint4 a, uint4 b) {
  return {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w};
}

// first, second: [vectors]
__global__ void read_kernel(const uint4* __restrict__ first, const uint4* __restrict__ second, std::size_t vectors,
                            uint4* sink) {
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  std::size_t at = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  uint4 combined = {};
  for (; at + (loads_in_flight - 1) * threads < vectors; at += loads_in_flight * threads) {
    uint4 loaded[2][loads_in_flight];
#pragma unroll
    for (int i = 0; i < loads_in_flight; ++i) {
      loaded[0][i] = __ldg(first + at + i * threads);
      loaded[1][i] = __ldg(second + at + i * threads);
    }
#pragma unroll
    for (int i = 0; i < loads_in_flight; ++i) {
      combined = combined ^ loaded[0][i] ^ loaded[1][i];
    }
  }
  for (; at < vectors; at += threads) {
    combined = combined ^ __ldg(first + at) ^ __ldg(second + at);
  }
  // Keeps the loads: the compiler cannot know that this does not happen.
  if (combined.x == 0x9e3779b9u && combined.y == 0x7f4a7c15u && combined.z == 0xf39cc060u &&
      combined.w == 0x5cedc834u) {
    *sink = combined;
  }
}

} // namespace

void launch_empty(cudaStream_t stream) {
  empty_kernel<<<1, 32, 0, stream>>>();
}

void launch_read(const void* first, const void* second, std::size_t bytes, LaunchShape shape, void* sink,
                 cudaStream_t stream) {
  read_kernel<<<shape.blocks, shape.threads, 0, stream>>>(static_cast<const uint4*>(first),
                                                          static_cast<const uint4*>(second), bytes / sizeof(uint4),
                                                          static_cast<uint4*>(sink));
}

} // namespace single_query::benchmark
