// The main of every test executable: Catch2 (v2.13 or v3) with an exit status by which CTest can tell a skip from a
// failure. 0: all passed. 77: all that was asked for are [gpu] tests, and there is no GPU. 1: everything else.
//
// Without a GPU the tests tagged [gpu] are left out; with SINGLE_QUERY_REQUIRE_GPU=1 in the environment that is a
// failure.
#define CATCH_CONFIG_RUNNER
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <string>

namespace {

constexpr int failed = 1;
constexpr int skipped = 77;

// Why there is no GPU; empty when there is one.
std::string missing_gpu() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) {
    return cudaGetErrorString(status);
  }
  return devices == 0 ? "no CUDA device" : "";
}

bool gpu_is_required() {
  const char* value = std::getenv("SINGLE_QUERY_REQUIRE_GPU");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

struct Selection {
  std::size_t tests = 0;
  std::size_t gpu_tests = 0;
};

// What the command line selects.
Selection selection(Catch::Session& session) {
  const auto& config = session.config();
  const auto& all = Catch::getAllTestCasesSorted(config);
  const auto selected = config.hasTestFilters() ? Catch::filterTests(all, config.testSpec(), config) : all;
  Selection result;
  for (const auto& test : selected) {
    ++result.tests;
    result.gpu_tests += test.getTestCaseInfo().tagsAsString().find("[gpu]") != std::string::npos;
  }
  return result;
}

} // namespace

int main(int argc, char** argv) {
  Catch::Session session;
  if (session.applyCommandLine(argc, argv) != 0) {
    return failed;
  }
  const Selection selected = selection(session);
  if (selected.tests == 0) {
    std::cerr << "No test matches.\n";
    return failed;
  }
  const std::string reason = selected.gpu_tests == 0 ? "" : missing_gpu();
  if (!reason.empty()) {
    std::cerr << selected.gpu_tests << " of " << selected.tests << " tests need a GPU: " << reason << '\n';
    if (gpu_is_required()) {
      return failed;
    }
    if (selected.gpu_tests == selected.tests) {
      return skipped;
    }
    auto options = session.configData();
    options.testsOrTags.push_back("~[gpu]");
    session.useConfigData(options);
  }
  return session.run() == 0 ? 0 : failed;
}
