// CUDA graphs, streams, threads and devices: every call goes to the current stream, and shares its scratch memory with
// nothing that may run at the same time.
#include "torch_case.h"

#include "device_kernels.h"

#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/cuda.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

namespace single_query::test {
namespace {

constexpr std::int64_t twenty_milliseconds = 40'000'000; // in clock cycles

// Long enough to be split, so that it needs scratch memory; lengths that are on the device.
struct LongCase {
  explicit LongCase(std::int64_t keys = 8192, int device = 0) {
    TensorCase c;
    c.keys = keys;
    c.head_dim = 64;
    c.dtype = at::kHalf;
    tensors = random_tensors(c, at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
    options.lengths = torch::tensor({keys, keys / 3}, at::kInt).to(tensors.query.device());
    torch::cuda::synchronize();
  }
  void set_length(std::int64_t length) { options.lengths->fill_(length); }
  at::Tensor run() const { return attention(tensors.query, tensors.key, tensors.value, options); }
  at::Tensor& run_into(at::Tensor& out) const {
    return attention_out(out, tensors.query, tensors.key, tensors.value, options);
  }

  Tensors tensors;
  AttentionOptions options;
};

// One call in a graph that LibTorch captures on a stream of its own.
struct CapturedCall {
  explicit CapturedCall(const LongCase& work) : stream(c10::cuda::getStreamFromPool()) {
    const c10::cuda::CUDAStreamGuard guard(stream);
    graph.capture_begin();
    output = work.run();
    graph.capture_end();
  }
  void replay() {
    const c10::cuda::CUDAStreamGuard guard(stream);
    graph.replay();
  }

  c10::cuda::CUDAStream stream;
  at::cuda::CUDAGraph graph;
  at::Tensor output;
};

// A call in a graph that LibTorch's allocator knows nothing of.
class RawCapturedCall {
public:
  RawCapturedCall(const LongCase& work, at::Tensor& out) : stream_(c10::cuda::getStreamFromPool()) {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    require_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    work.run_into(out);
    cudaGraph_t graph = nullptr;
    require_cuda(cudaStreamEndCapture(stream_, &graph));
    require_cuda(cudaGraphInstantiate(&executable_, graph, 0));
    require_cuda(cudaGraphDestroy(graph));
  }
  RawCapturedCall(const RawCapturedCall&) = delete;
  RawCapturedCall& operator=(const RawCapturedCall&) = delete;
  ~RawCapturedCall() { cudaGraphExecDestroy(executable_); }
  void replay() const { require_cuda(cudaGraphLaunch(executable_, stream_)); }

private:
  c10::cuda::CUDAStream stream_;
  cudaGraphExec_t executable_ = nullptr;
};

// Tensors of ones in what memory the allocator has free, on every stream of its pool.
std::vector<at::Tensor> take_free_memory() {
  std::vector<at::Tensor> taken;
  for (int i = 0; i < 32; ++i) {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    for (std::int64_t kilobytes = 1; kilobytes <= 16384; kilobytes *= 2) {
      taken.push_back(torch::ones({kilobytes * 256}, at::kCUDA));
    }
  }
  torch::cuda::synchronize();
  return taken;
}

std::int64_t allocated_bytes() {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
}

} // namespace

TEST_CASE("A41: a graph captured at length 1 gives the eager bits at every length it is replayed with",
          "[gpu][caching]") {
  LongCase work;
  work.set_length(1);
  CapturedCall captured(work);
  for (const std::int64_t length : {1, 2, 129, 4097, 8192, 0, 7}) {
    work.set_length(length);
    const at::Tensor expected = work.run();
    torch::cuda::synchronize();
    captured.replay();
    torch::cuda::synchronize();
    INFO(length);
    CHECK(same_bits(captured.output, expected));
  }
}

// CTest also runs it alone, as the first call of a process.
TEST_CASE("A42: the first call of a process or thread may be inside a capture, and a refused one leaves it whole",
          "[gpu][caching][first_call]") {
  const LongCase work;
  at::Tensor first, second, eager;
  std::string refusal;
  std::thread([&] {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    first = work.run();
    refusal = error_of([&] { attention(work.tensors.query, work.tensors.key, work.tensors.value.slice(2, 1)); });
    second = work.run();
    graph.capture_end();
    graph.replay();
    eager = work.run(); // on the stream that was captured
    torch::cuda::synchronize();
    first = first.clone();
    second = second.clone();
    torch::cuda::synchronize();
  }).join();
  CHECK(refusal.find("value has shape") != std::string::npos);
  const at::Tensor expected = work.run();
  CHECK(same_bits(first, expected));
  CHECK(same_bits(second, expected));
  CHECK(same_bits(eager, expected));
}

TEST_CASE("Graphs with the same shapes, replayed at once on two streams beside eager calls, keep apart",
          "[gpu][caching]") {
  const LongCase one, two;
  two.tensors.value.neg_();
  const at::Tensor expected_one = one.run(), expected_two = two.run();
  CapturedCall captured_one(one), captured_two(two);
  torch::cuda::synchronize();
  CHECK_FALSE(same_bits(expected_one, expected_two));
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  for (int i = 0; i < 200; ++i) {
    captured_one.replay();
    captured_two.replay();
    const at::Tensor eager = i % 2 == 0 ? one.run() : two.run();
    if (i % 20 == 19) {
      torch::cuda::synchronize();
      CHECK(same_bits(captured_one.output, expected_one));
      CHECK(same_bits(captured_two.output, expected_two));
      CHECK(same_bits(eager, expected_two));
    }
  }
}

TEST_CASE("A graph owns its scratch memory, whoever captured it and whatever is freed and allocated since",
          "[gpu][caching]") {
  const LongCase work;
  const at::Tensor expected = work.run();
  at::Tensor out = torch::empty_like(expected);
  torch::cuda::synchronize();
  const RawCapturedCall raw(work, out);
  CapturedCall captured(work);
  for (int i = 0; i < 3; ++i) {
    work.run();
    torch::cuda::synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache(); // to the driver, which hands it to the next ones
    const std::vector<at::Tensor> others = take_free_memory();
    out.fill_(std::nan(""));
    torch::cuda::synchronize();
    raw.replay();
    captured.replay();
    torch::cuda::synchronize();
    for (const at::Tensor& other : others) {
      CHECK(other.eq(1).all().item<bool>());
    }
    CHECK(same_bits(out, expected));
    CHECK(same_bits(captured.output, expected));
  }
}

TEST_CASE("A15: calls go to the current stream and wait for what is on it", "[gpu]") {
  LongCase work(64);
  const at::Tensor new_query = torch::randn_like(work.tensors.query);
  const at::Tensor old_query = work.tensors.query.clone();
  work.tensors.query.copy_(new_query);
  const at::Tensor expected = work.run().clone();
  work.tensors.query.copy_(old_query);
  torch::cuda::synchronize();
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  for (int i = 0; i < 20; ++i) {
    const c10::cuda::CUDAStreamGuard guard(stream);
    work.tensors.query.copy_(old_query);
    at::cuda::sleep(twenty_milliseconds);
    work.tensors.query.copy_(new_query);
    const at::Tensor output = work.run().clone();
    CHECK(c10::cuda::getCurrentCUDAStream() == stream);
    CHECK(same_bits(output, expected));
  }
}

TEST_CASE("A36: 10,000 calls on each of 4 streams of 8 threads give the bits of calls alone and leave no memory behind",
          "[gpu][large][caching]") {
  const LongCase works[] = {LongCase(8192), LongCase(64), LongCase(5000), LongCase(1)};
  std::vector<at::Tensor> expected;
  for (const LongCase& work : works) {
    expected.push_back(work.run());
  }
  torch::cuda::synchronize();
  const auto call = [&](Random& random, bool late, unsigned* wrong) { // on the current stream; the GPU compares
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const std::size_t which = random.bits() % expected.size();
    LongCase work = works[which];
    if (late) { // the query is NaN until shortly before the call
      work.tensors.query = torch::full_like(work.tensors.query, std::nan(""));
      keep_waiting(stream, 1);
      work.tensors.query.copy_(works[which].tensors.query);
    }
    const at::Tensor output = work.run();
    compare_and_poison(stream, output.data_ptr(), expected[which].data_ptr(), output.nbytes(), wrong);
  };
  const auto work = [&](int calls) {
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&, thread] {
        Random random(thread);
        std::vector<c10::cuda::CUDAStream> streams;
        std::vector<at::Tensor> counts;
        for (int i = 0; i < 4; ++i) {
          streams.push_back(c10::cuda::getStreamFromPool());
          const c10::cuda::CUDAStreamGuard guard(streams.back());
          counts.push_back(torch::zeros({1}, torch::dtype(at::kInt).device(at::kCUDA)));
        }
        for (int i = 0; i < calls * 4; ++i) {
          const auto lane = static_cast<std::size_t>(i % 4);
          const c10::cuda::CUDAStreamGuard guard(streams[lane]);
          const bool late = i < 4 || random.chance(0.002);
          call(random, late, reinterpret_cast<unsigned*>(counts[lane].data_ptr<int>()));
        }
        for (std::size_t lane = 0; lane < 4; ++lane) {
          const c10::cuda::CUDAStreamGuard guard(streams[lane]);
          wrong += counts[lane].item<int>();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return wrong.load();
  };
  const auto free_bytes = [] {
    torch::cuda::synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    std::size_t free = 0, total = 0;
    require_cuda(cudaMemGetInfo(&free, &total));
    return free;
  };
  CHECK(work(10) == 0); // whatever is set up once
  const std::size_t free_before = free_bytes();
  const std::int64_t allocated_before = allocated_bytes();
  CHECK(work(10'000) == 0);
  CHECK(free_bytes() >= free_before);
  CHECK(allocated_bytes() == allocated_before);
}

TEST_CASE("In the steady state a call allocates its output and nothing else", "[gpu][caching]") {
  const LongCase work;
  at::Tensor out = work.run();
  const auto allocations = [] { return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocation[0].allocated; };
  const auto before = allocations();
  for (int i = 0; i < 100; ++i) {
    work.run_into(out);
  }
  CHECK(allocations() == before);
  work.run();
  CHECK(allocations() == before + 1);
}

TEST_CASE("What threads, streams and graphs had is free again when they are gone", "[gpu][caching]") {
  const LongCase work, short_work(16);
  work.run();
  torch::cuda::synchronize();
  const auto use_everything = [&] {
    std::thread([&] {
      for (int i = 0; i < 100; ++i) { // more streams in turn than a thread keeps workspaces for
        const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(i % 2 == 0));
        short_work.run();
        work.run();
      }
      auto captured = std::make_unique<CapturedCall>(work);
      captured->replay();
      torch::cuda::synchronize();
    }).join();
    torch::cuda::synchronize();
    work.run(); // frees what destroyed graphs gave up
    torch::cuda::synchronize();
  };
  use_everything();
  // The driver destroys what a graph owned on a thread of its own, at a time of its choosing: what one round leaves may
  // be waiting for the next, but it does not grow.
  const std::int64_t before = allocated_bytes();
  for (int i = 0; i < 10; ++i) {
    use_everything();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  work.run();
  CHECK(allocated_bytes() <= before);
}

TEST_CASE("A CUDA error that the caller left pending is neither consumed nor blamed on the call", "[gpu]") {
  const LongCase work;
  const at::Tensor expected = work.run();
  at::Tensor out = torch::empty_like(expected);
  torch::cuda::synchronize();
  REQUIRE(cudaSetDevice(1000) != cudaSuccess);
  const cudaError_t pending = cudaPeekAtLastError();
  CHECK(error_of([&] { work.run_into(out); }).empty());
  CHECK(cudaPeekAtLastError() == pending);
  CHECK(cudaGetLastError() == pending);
  CHECK(same_bits(out, expected));
}

TEST_CASE("Device, stream, grad mode and CUDA's error are as they were on every way out", "[gpu]") {
  const LongCase work;                                                            // needs a workspace
  const Tensors little = random_tensors({2, 4, 4, 16, 64, at::kHalf}, at::kCUDA); // needs none
  const at::Tensor expected = work.run();
  at::Tensor out = torch::full_like(expected, 5);
  const at::Tensor untouched = out.clone();
  torch::cuda::synchronize();
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (const bool grad : {true, false}) {
    const at::AutoGradMode mode(grad);
    const auto message_of = [&](const std::function<void()>& call) {
      std::string message = error_of(call);
      CHECK(c10::cuda::current_device() == 0);
      CHECK(c10::cuda::getCurrentCUDAStream() == stream);
      CHECK(at::GradMode::is_enabled() == grad);
      CHECK(cudaPeekAtLastError() == cudaSuccess);
      return message;
    };
    CHECK_FALSE(message_of([&] { attention_out(out, out, work.tensors.key, work.tensors.value); }).empty());
    CHECK_FALSE(message_of([&] { attention(work.tensors.query, work.tensors.key, little.value); }).empty());
    // Waiting spoils a capture, and whatever is launched into it then fails.
    require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaStreamSynchronize(stream) != cudaSuccess);
    cudaGetLastError();
    const std::string no_launch = message_of([&] { attention_out(out, little.query, little.key, little.value); });
    const std::string no_workspace = message_of([&] { work.run_into(out); });
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
    cudaGetLastError();
    CHECK(no_launch.find("cudaErrorStreamCaptureInvalidated") != std::string::npos);
    CHECK(no_workspace.find("cudaErrorStreamCaptureInvalidated") != std::string::npos);
    CHECK(same_bits(out, untouched));
    CHECK(message_of([&] { work.run_into(out); }).empty());
    CHECK(same_bits(out, expected));
    out.copy_(untouched);
  }
}

TEST_CASE("A14: tensors on a device that is not the current one are computed there", "[gpu]") {
  if (c10::cuda::device_count() < 2) {
    WARN("A14 needs two GPUs: not run");
    return;
  }
  const LongCase here, there(8192, 1);
  const at::Tensor expected = here.run();
  REQUIRE(c10::cuda::current_device() == 0);
  const at::Tensor output = there.run();
  CHECK(output.device().index() == 1);
  CHECK(same_bits(output.cpu(), expected.cpu()));
  CHECK_FALSE(error_of([&] { attention(there.tensors.query, here.tensors.key, there.tensors.value); }).empty());
  CHECK(c10::cuda::current_device() == 0);
  const auto [merged, lse] = merge(torch::stack({output, output}), torch::zeros({2, 2, 4}, output.device()));
  CHECK(merged.device().index() == 1);
  CHECK(lse.device().index() == 1);
  CHECK(c10::cuda::current_device() == 0);
}

} // namespace single_query::test
