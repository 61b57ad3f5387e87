// Linked with the merge and its launch compiled for compute capability 7.5 alone, which no GPU that is supported can
// run.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "device.h"
#include "merge_case.h"

#include <array>
#include <string>

namespace single_query::test {

TEST_CASE("A35: a build without code for the GPU throws, naming GPU and code, writes nothing, and the process lives",
          "[gpu]") {
  constexpr std::array<float, 4> numbers = {1, 0, -7, -7}; // a part's output and lse, the merged ones
  Memory memory(Device::cuda, sizeof(numbers));
  memory.upload(numbers.data(), sizeof(numbers));
  const MergeProblem problem = smallest_merge(reinterpret_cast<float*>(memory.data()));
  for (int call = 0; call < 2; ++call) {
    std::string message = "nothing thrown";
    try {
      merge(problem, nullptr);
    } catch (const Error& error) {
      CHECK(error.kind() == Error::Kind::cuda);
      message = error.what();
    }
    INFO(message);
    cudaDeviceProp gpu{};
    require_cuda(cudaGetDeviceProperties(&gpu, 0));
    const std::string capability = std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
    CHECK(message.find("compute capability " + capability) != std::string::npos);
    CHECK(message.find("code for 750") != std::string::npos);
    CHECK(message.find("cudaErrorNoKernelImageForDevice") != std::string::npos);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    std::array<float, 4> now = {};
    memory.download(now.data(), sizeof(now));
    CHECK(now == numbers);
  }
}

} // namespace single_query::test
