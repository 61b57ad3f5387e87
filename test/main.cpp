// The main of every test executable: Catch2 (v2.13 or v3) with an exit status that CTest can tell a skip from a failure
// by. 0: all passed. 77: nothing but [gpu] tests was asked for, and there is no GPU. 1: everything else.
//
// Without a GPU the tests tagged [gpu] are left out; with SINGLE_QUERY_REQUIRE_GPU=1 in the environment that is a
// failure.
#define CATCH_CONFIG_RUNNER
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Listener = Catch::EventListenerBase;
#else
#include <catch2/catch.hpp>
using Listener = Catch::TestEventListenerBase;
#endif

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace {

int tests_run = 0;

struct CountTests : Listener {
  using Listener::Listener;
  void testCaseStarting(const Catch::TestCaseInfo&) override { ++tests_run; }
};
CATCH_REGISTER_LISTENER(CountTests)

// Why there is no GPU; empty when there is one.
std::string missing_gpu() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) {
    return cudaGetErrorString(status);
  }
  return devices == 0 ? "no device" : "";
}

bool gpu_is_required() {
  const char* value = std::getenv("SINGLE_QUERY_REQUIRE_GPU");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

} // namespace

int main(int argc, char** argv) {
  constexpr int failed = 1;
  constexpr int skipped = 77;
  const std::string without_gpu = "~[gpu]";

  Catch::Session session;
  if (session.applyCommandLine(argc, argv) != 0) {
    return failed;
  }
  const std::string reason = missing_gpu();
  auto& selection = session.configData().testsOrTags;
  const bool gpu_wanted = selection.empty() || selection.front() != without_gpu;
  const bool gpu_left_out = gpu_wanted && !reason.empty();
  if (gpu_left_out) {
    std::cerr << "The [gpu] tests are left out: " << reason << '\n';
    if (gpu_is_required()) {
      std::cerr << "SINGLE_QUERY_REQUIRE_GPU is set: that is a failure.\n";
      return failed;
    }
    selection.push_back(without_gpu);
  }
  const int status = session.run();
  if (tests_run == 0 && gpu_left_out) {
    return skipped;
  }
  return status == 0 ? 0 : failed;
}
