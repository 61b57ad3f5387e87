#include "device.h"

#include <array>
#include <atomic>
#include <string>

#define SINGLE_QUERY_TEXT_OF(...) #__VA_ARGS__
#define SINGLE_QUERY_TEXT(...) SINGLE_QUERY_TEXT_OF(__VA_ARGS__)

namespace single_query {
namespace {

// Runs `call`, which asks something of CUDA. Where it fails, the error is reported and not left for the caller to find;
// one that he has not collected yet stays his.
template <class Call, class Describe>
void check_cuda(const Call& call, const Describe& describe) {
  const cudaError_t pending = cudaPeekAtLastError();
  const cudaError_t error = call();
  if (error == cudaSuccess) {
    return;
  }
  const std::string message =
      "single_query: " + describe() + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  if (pending == cudaSuccess) {
    cudaGetLastError();
  }
  throw Error(Error::Kind::cuda, message);
}

std::string describe(int device) {
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return "device " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
         std::to_string(minor) + ", this library holds code for " SINGLE_QUERY_TEXT(__CUDA_ARCH_LIST__) " (times ten)";
}

std::string describe_current() {
  int device = 0;
  cudaGetDevice(&device);
  return describe(device);
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda([&] { return cudaDeviceGetAttribute(&value, which, device); },
             [] { return std::string("cudaDeviceGetAttribute"); });
  return value;
}

} // namespace

Device current_device() {
  // Packed so that one relaxed load is the whole steady-state cost: multiprocessors, shared bytes, clusters, known.
  static std::array<std::atomic<std::uint64_t>, 64> known{};
  int index = 0;
  check_cuda([&] { return cudaGetDevice(&index); }, [] { return std::string("no current CUDA device"); });
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

void allow_shared_memory(const void* function, const Device& device) {
  const auto describe_fault = [] { return "the kernel cannot be loaded (" + describe_current() + ")"; };
  cudaFuncAttributes attributes{};
  check_cuda([&] { return cudaFuncGetAttributes(&attributes, function); }, describe_fault);
  const int dynamic_bytes = device.shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
  check_cuda([&] { return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes); },
             describe_fault);
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
  check_cuda([&] { return cudaLaunchKernelExC(&config, launch.function, arguments); },
             [] { return "kernel launch failed (" + describe_current() + ")"; });
}

} // namespace single_query
