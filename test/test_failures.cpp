// What CUDA refuses is reported by its name, nothing is half written, and the process and the caller's own errors live
// on.
#include "each_device.h"
#include "merge_case.h"

#include <array>
#include <string>

// The launches of the library come by here (the linker's --wrap), so that CUDA can be made to refuse them.
// NOLINTBEGIN(bugprone-reserved-identifier): the linker gives these names
extern "C" cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args);
extern "C" cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args);
// NOLINTEND(bugprone-reserved-identifier)

namespace single_query::test {
namespace {

enum class Excess { none, shared_memory, threads };

thread_local Excess excess = Excess::none;          // what the launches of this thread ask too much of
thread_local cudaError_t last_launch = cudaSuccess; // what CUDA said to the last one

// Small and large, with and without clusters, rows and shares of rows.
constexpr std::array launches = {"keys=64 head_dim=32", "query_heads=4 kv_heads=4 keys=1000 head_dim=64",
                                 "dtype=bfloat16 query_heads=8 kv_heads=2 keys=9000 head_dim=128",
                                 "query_heads=8 kv_heads=1 keys=5000 head_dim=128",
                                 "dtype=float16 batch=80 query_heads=8 kv_heads=4 keys=100 head_dim=64 lengths=b"};

MergeCase merge_case() {
  MergeCase c;
  c.parts = 3;
  c.heads = 4;
  c.head_dim = 64;
  return c;
}

bool same_result(const Result& a, const Result& b) {
  return same_rows(a, 0, b, 0, a.rows);
}

// The message of the error of CUDA's that `call` throws.
template <class Call>
std::string cuda_error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == Error::Kind::cuda);
    return error.what();
  }
  return "nothing thrown";
}

bool mentions(const std::string& message, const std::string& word) {
  return message.find(word) != std::string::npos;
}

// The call fails with what it returns as its message, writes nothing, and leaves no error behind.
std::string failure_of(const AttentionData& data) {
  Placement placement(data, Device::cuda);
  placement.poison_results(Fill::nan);
  const Result poisoned = placement.results();
  shared_workspace().at_least(attention_workspace_bytes(placement.problem));
  std::string message = cuda_error_of([&] { launch(placement.problem, shared_stream(), shared_workspace()); });
  INFO(to_line(data.attention_case()) << ": " << message);
  CHECK(mentions(message, "compute capability"));
  CHECK(mentions(message, "this library holds code for"));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(same_result(placement.results(), poisoned));
  return message;
}

} // namespace
} // namespace single_query::test

// NOLINTNEXTLINE(bugprone-reserved-identifier)
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) {
  using namespace single_query::test;
  cudaLaunchConfig_t asked = *config;
  if (excess == Excess::shared_memory) {
    asked.dynamicSmemBytes = std::size_t{1} << 20;
  } else if (excess == Excess::threads) {
    asked.blockDim = dim3(1504);
  }
  last_launch = __real_cudaLaunchKernelExC(&asked, function, args);
  return last_launch;
}

namespace single_query::test {

TEST_CASE("A34: a launch that CUDA refuses throws with its error's name, writes nothing, and the next call works",
          "[gpu]") {
  for (const char* line : launches) {
    const AttentionData data(parse_case(line));
    const Result expected = run(data, Device::cuda);
    for (const Excess what : {Excess::shared_memory, Excess::threads}) {
      excess = what;
      const std::string message = failure_of(data);
      excess = Excess::none;
      INFO(line << ": " << message);
      CHECK(last_launch != cudaSuccess);
      CHECK(mentions(message, "kernel launch failed"));
      CHECK(mentions(message, cudaGetErrorName(last_launch)));
      CHECK(same_result(run(data, Device::cuda), expected));
    }
  }
  // Over an error that the caller has not collected.
  const AttentionData data(parse_case(launches[0]));
  Placement placement(data, Device::cuda);
  void* nothing = nullptr;
  CHECK(cudaMalloc(&nothing, std::size_t{1} << 60) == cudaErrorMemoryAllocation);
  excess = Excess::threads;
  cuda_error_of([&] { launch(placement.problem, shared_stream(), shared_workspace()); });
  excess = Excess::none;
  CHECK(cudaGetLastError() != cudaSuccess);

  const MergeData parts(merge_case());
  const Result merged = parts.run(Device::cuda);
  excess = Excess::shared_memory;
  const std::string message = cuda_error_of([&] { parts.run(Device::cuda); });
  excess = Excess::none;
  CHECK(mentions(message, cudaGetErrorName(last_launch)));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(same_result(parts.run(Device::cuda), merged));
}

TEST_CASE("A34: a launch that fails throws with the CUDA error's name, writes nothing, and the next call works",
          "[gpu]") {
  const AttentionData data(parse_case("query_heads=4 keys=300 head_dim=64"));
  const Result expected = run(data, Device::cuda);
  Placement placement(data, Device::cuda);
  placement.poison_results(Fill::nan);
  const Result poisoned = placement.results();
  const Stream stream;
  // Waiting for a stream that is captured spoils the capture, and every launch into it then fails.
  require_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  CHECK(cudaStreamSynchronize(stream.get()) != cudaSuccess);
  cudaGetLastError();
  const std::string message = cuda_error_of([&] { launch(placement.problem, stream, shared_workspace()); });
  INFO(message);
  CHECK(mentions(message, "cudaErrorStreamCaptureInvalidated"));
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(stream.get(), &graph) == cudaErrorStreamCaptureInvalidated);
  cudaGetLastError();
  CHECK(same_result(placement.results(), poisoned));
  launch(placement.problem, stream, shared_workspace());
  stream.wait();
  CHECK(same_result(placement.results(), expected));
}

TEST_CASE("A CUDA error of the caller's own is neither consumed nor blamed on the call", "[gpu]") {
  const AttentionData data(parse_case("query_heads=4 keys=300 head_dim=64"));
  const Result expected = run(data, Device::cuda);
  Placement placement(data, Device::cuda);
  placement.poison_results(Fill::nan);
  shared_workspace().at_least(attention_workspace_bytes(placement.problem));
  void* nothing = nullptr;
  CHECK(cudaMalloc(&nothing, std::size_t{1} << 60) == cudaErrorMemoryAllocation);
  CHECK_NOTHROW(launch(placement.problem, shared_stream(), shared_workspace()));
  CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
  AttentionProblem bad = placement.problem;
  bad.head_dim = 0;
  CHECK_THROWS(launch(bad, shared_stream(), shared_workspace()));
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  shared_stream().wait();
  CHECK(same_result(placement.results(), expected));
}

// Run by CTest with an environment in which the driver loads no kernel for any GPU.
TEST_CASE("A35: without code for the GPU a call throws, naming GPU and code, and the process lives",
          "[.no_code][gpu]") {
  for (const char* line : launches) {
    CHECK(mentions(failure_of(AttentionData(parse_case(line))), "cudaError"));
  }
  const MergeData parts(merge_case());
  const std::string message = cuda_error_of([&] { parts.run(Device::cuda); });
  INFO(message);
  CHECK(mentions(message, "cudaError"));
  CHECK(mentions(message, "this library holds code for"));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  expect_pass(AttentionData(parse_case("keys=64 head_dim=32")), Device::cpu);
}

// Run by CTest with an environment that hides all GPUs.
TEST_CASE("Without a GPU a call throws with CUDA's error, which is not left behind, and the host twin works",
          "[.no_gpu]") {
  const cudaError_t before = cudaPeekAtLastError(); // without a driver, that too is an error
  for (const char* line : launches) {
    const AttentionData data(parse_case(line));
    const Placement placement(data, Device::cpu); // never read: there is nothing that could
    for (const std::string& message : {cuda_error_of([&] { attention_workspace_bytes(placement.problem); }),
                                       cuda_error_of([&] { attention(placement.problem, nullptr, 0, nullptr); })}) {
      INFO(line << ": " << message);
      CHECK(mentions(message, "no current CUDA device: cudaError"));
    }
    CHECK(cudaPeekAtLastError() == before);
  }
  float numbers[4] = {};
  CHECK(mentions(cuda_error_of([&] { merge(smallest_merge(numbers), nullptr); }), "no current CUDA device: cudaError"));
  CHECK(cudaPeekAtLastError() == before);
  expect_pass(AttentionData(parse_case("keys=64 head_dim=32")), Device::cpu);
}

} // namespace single_query::test
