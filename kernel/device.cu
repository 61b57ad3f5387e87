#include "device.h"

#include <array>
#include <atomic>

#define SINGLE_QUERY_TEXT_OF(...) #__VA_ARGS__
#define SINGLE_QUERY_TEXT(...) SINGLE_QUERY_TEXT_OF(__VA_ARGS__)

namespace single_query {
namespace {

// Only what this library asked for failed; an error that the caller has not collected yet stays his.
[[noreturn]] void throw_cuda(cudaError_t error, const std::string& what) {
  throw Error(Error::Kind::cuda, what + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

std::string describe(int device) {
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return "device " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
         std::to_string(minor) + ", this library holds code for " SINGLE_QUERY_TEXT(__CUDA_ARCH_LIST__) " (times ten)";
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "single_query: cudaDeviceGetAttribute");
  return value;
}

} // namespace

void check_cuda(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) {
    throw_cuda(error, what);
  }
}

Device current_device() {
  // Packed so that one relaxed load is the whole steady-state cost: multiprocessors, shared bytes, clusters, known.
  static std::array<std::atomic<std::uint64_t>, 64> known{};
  int index = 0;
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) {
    throw_cuda(error, "single_query: no current CUDA device");
  }
  std::uint64_t facts = index < 64 ? known[index].load(std::memory_order_relaxed) : 0;
  if (facts == 0) {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, index);
    if (major < 8) {
      throw Error(Error::Kind::cuda, "single_query: " + describe(index) + "; 8.0 is the least it can run on");
    }
    facts = 1 | static_cast<std::uint64_t>(major >= 9) << 1 |
            static_cast<std::uint64_t>(attribute(cudaDevAttrMultiProcessorCount, index)) << 2 |
            static_cast<std::uint64_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index)) << 32;
    if (index < 64) {
      known[index].store(facts, std::memory_order_relaxed);
    }
  }
  return {index, {static_cast<int>(facts >> 2 & 0x3fffffff), (facts & 2) != 0}, static_cast<int>(facts >> 32)};
}

void launch(const Launch& launch, const void* argument) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(launch.cluster_size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  config.attrs = &cluster;
  config.numAttrs = launch.cluster_size > 1 ? 1 : 0;
  void* arguments[] = {const_cast<void*>(argument)};
  const cudaError_t pending = cudaPeekAtLastError();
  const cudaError_t error = cudaLaunchKernelExC(&config, launch.function, arguments);
  if (error == cudaSuccess) {
    return;
  }
  if (pending == cudaSuccess) {
    cudaGetLastError(); // ours, and reported right here
  }
  int device = 0;
  cudaGetDevice(&device);
  throw_cuda(error, "single_query: kernel launch failed (" + describe(device) + ")");
}

} // namespace single_query
