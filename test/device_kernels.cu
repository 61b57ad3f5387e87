#include "device_kernels.h"

#include "device.h"

#include <cstdint>

namespace single_query::test {
namespace {

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void wait_on_device(std::uint64_t duration) {
  const std::uint64_t start = nanoseconds();
  while (nanoseconds() - start < duration) {
    __nanosleep(1000);
  }
}

__global__ void poison_block(unsigned words) {
  extern __shared__ volatile std::uint32_t shared[];
  for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
    shared[i] = 0x7fffffff; // and 0x7fff and 0xffff are NaN of both 16-bit dtypes
  }
}

__global__ void compare_on_device(std::uint16_t* result, const std::uint16_t* expected, std::size_t count,
                                  unsigned* wrong) {
  bool differs = false;
  for (std::size_t i = threadIdx.x; i < count; i += blockDim.x) {
    differs = differs || result[i] != expected[i];
    result[i] = 0xffff;
  }
  if (__syncthreads_or(differs) && threadIdx.x == 0) {
    ++*wrong;
  }
}

} // namespace

void keep_waiting(cudaStream_t stream, int milliseconds) {
  wait_on_device<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(milliseconds) * 1'000'000);
  require_cuda(cudaGetLastError());
}

void poison_shared_memory(cudaStream_t stream) {
  int device = 0, bytes = 0, multiprocessors = 0;
  require_cuda(cudaGetDevice(&device));
  require_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  require_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  require_cuda(cudaFuncSetAttribute(poison_block, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  // No two of these blocks fit onto one multiprocessor.
  poison_block<<<multiprocessors, 1024, bytes, stream>>>(static_cast<unsigned>(bytes) / 4);
  require_cuda(cudaGetLastError());
}

void compare_and_poison(cudaStream_t stream, void* result, const void* expected, std::size_t bytes, unsigned* wrong) {
  compare_on_device<<<1, 512, 0, stream>>>(static_cast<std::uint16_t*>(result),
                                           static_cast<const std::uint16_t*>(expected), bytes / 2, wrong);
  require_cuda(cudaGetLastError());
}

} // namespace single_query::test
