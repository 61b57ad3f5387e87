#include "benchmark_timing.h"

#include "read_bandwidth.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <limits>

#include <unistd.h>

namespace single_query::benchmark {
namespace {

constexpr int usual_repetitions = 25;
constexpr int fewest_repetitions = 5;
constexpr double longest_microseconds = 3e6; // of one measurement, before repetitions are left out

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void synchronize() {
  C10_CUDA_CHECK(cudaStreamSynchronize(at::cuda::getCurrentCUDAStream()));
}

void synchronize(const at::Tensor& result) {
  if (result.is_cuda()) {
    synchronize();
  }
}

Timing summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}

int repetitions(double microseconds_each) {
  return std::clamp(static_cast<int>(longest_microseconds / std::max(microseconds_each, 1.0)), fewest_repetitions,
                    usual_repetitions);
}

// Reads several times the L2's size of memory that no call uses, long enough for the host to enqueue what follows.
class CacheFlush {
public:
  CacheFlush()
      : memory_(at::empty({2, at::cuda::getCurrentDeviceProperties()->l2CacheSize * std::int64_t{2}},
                          at::TensorOptions(at::kCUDA).dtype(at::kByte))),
        sink_(at::empty({16}, memory_.options())) {}

  void operator()() const {
    const unsigned blocks = 4 * static_cast<unsigned>(at::cuda::getCurrentDeviceProperties()->multiProcessorCount);
    for (int pass = 0; pass < 3; ++pass) {
      launch_read(memory_[0].data_ptr(), memory_[1].data_ptr(), memory_[0].nbytes(), {blocks, 256}, sink_.data_ptr(),
                  at::cuda::getCurrentCUDAStream());
    }
  }

private:
  at::Tensor memory_;
  at::Tensor sink_;
};

// Records `calls` calls. A call that throws, or that does what a capture does not allow, throws from here, and the
// stream and LibTorch's allocator are as before.
void capture(at::cuda::CUDAGraph& graph, const Call& call, std::int64_t calls, std::int64_t caches) {
  const c10::MempoolId_t pool = at::cuda::graph_pool_handle();
  std::exception_ptr failure;
  graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  try {
    for (std::int64_t i = 0; i < calls; ++i) {
      call(i % caches);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    graph.capture_end();
  } catch (...) {
    failure = failure ? failure : std::current_exception();
    try { // capture_end() leaves this to be done where the capture itself failed
      c10::cuda::CUDACachingAllocator::endAllocateToPool(at::cuda::current_device(), pool);
      c10::cuda::CUDACachingAllocator::releasePool(at::cuda::current_device(), pool);
    } catch (const std::exception&) { // it had been done
    }
    cudaGetLastError(); // the capture's failure is not the next call's
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

// Also builds what is built at a first call.
double one_call(const Call& call) {
  call(0);
  synchronize(call(0));
  const Clock::time_point start = Clock::now();
  synchronize(call(0));
  return microseconds_since(start);
}

} // namespace

Timing time_in_graph(const Call& call, std::int64_t caches, std::int64_t calls, bool flush) {
  const CacheFlush flush_caches;
  one_call(call);

  at::cuda::CUDAGraph graph;
  capture(graph, call, calls, caches);
  at::cuda::CUDAEvent start(cudaEventDefault);
  at::cuda::CUDAEvent end(cudaEventDefault);
  const auto replay = [&] {
    if (flush) {
      flush_caches();
    }
    start.record();
    graph.replay();
    end.record();
    end.synchronize();
    return 1e3 * static_cast<double>(start.elapsed_time(end)); // milliseconds -> microseconds
  };
  replay(); // uploads the graph
  const int replays = repetitions(replay());
  std::vector<double> times;
  times.reserve(static_cast<std::size_t>(replays));
  for (int i = 0; i < replays; ++i) {
    times.push_back(replay() / static_cast<double>(calls));
  }
  return summary(times);
}

std::int64_t calls_in_graph(double bytes_per_call, std::int64_t caches) {
  constexpr double bytes_in_graph = 4e9; // about a millisecond's
  return std::max(caches, static_cast<std::int64_t>(std::clamp(bytes_in_graph / bytes_per_call, 8.0, 64.0)));
}

Timing time_eager(const Call& call, std::int64_t caches) {
  constexpr double microseconds_in_a_row = 5e3;
  const double once = one_call(call);
  const auto calls =
      std::clamp(static_cast<std::int64_t>(microseconds_in_a_row / once), std::int64_t{8}, std::int64_t{400});
  std::vector<double> times;
  for (int repetition = 0; repetition < usual_repetitions; ++repetition) {
    const Clock::time_point start = Clock::now();
    at::Tensor result;
    for (std::int64_t i = 0; i < calls; ++i) {
      result = call(i % caches);
    }
    synchronize(result);
    times.push_back(microseconds_since(start) / static_cast<double>(calls));
  }
  return summary(times);
}

Timing time_on_host(const Call& call) {
  constexpr int rounds = 200;
  constexpr int calls = 500; // fewer than the launches that CUDA takes before it makes the host wait
  one_call(call);
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < calls; ++i) {
      call(0);
    }
    times.push_back(microseconds_since(start) / calls);
    synchronize();
  }
  return summary(times);
}

std::vector<Timing> time_interleaved(const std::vector<Implementation>& implementations, std::int64_t caches) {
  constexpr double microseconds_in_a_row = 2e3;
  struct Turn {
    std::int64_t calls;
    std::int64_t next_cache;
    std::vector<double> times = {};
  };
  std::vector<Turn> turns;
  double microseconds_each = 0;
  for (const Implementation& implementation : implementations) {
    implementation.select();
    const double once = one_call(implementation.call);
    // Each begins far from where the others do, or it would find in the processor what the one before it has read.
    const std::int64_t first_cache = caches * std::ssize(turns) / std::ssize(implementations);
    turns.push_back({std::max<std::int64_t>(1, static_cast<std::int64_t>(microseconds_in_a_row / once)), first_cache});
    microseconds_each += std::max(microseconds_in_a_row, once);
  }
  const int rounds = repetitions(microseconds_each);
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < turns.size(); ++i) {
      implementations[i].select();
      Turn& turn = turns[i];
      const Clock::time_point start = Clock::now();
      for (std::int64_t call = 0; call < turn.calls; ++call) {
        implementations[i].call(turn.next_cache);
        turn.next_cache = turn.next_cache + 1 == caches ? 0 : turn.next_cache + 1;
      }
      turn.times.push_back(microseconds_since(start) / static_cast<double>(turn.calls));
    }
  }
  std::vector<Timing> timings;
  timings.reserve(turns.size());
  for (Turn& turn : turns) {
    timings.push_back(summary(std::move(turn.times)));
  }
  return timings;
}

double cold_bytes(at::Device device) {
  const double cache = device.is_cuda() ? at::cuda::getCurrentDeviceProperties()->l2CacheSize
                                        : static_cast<double>(sysconf(_SC_LEVEL3_CACHE_SIZE)); // 0 where not known
  return std::max(150e6, 2.5 * cache);
}

Timing time_read(const std::vector<at::Tensor>& key, const std::vector<at::Tensor>& value, std::int64_t calls) {
  const auto processors = static_cast<unsigned>(at::cuda::getCurrentDeviceProperties()->multiProcessorCount);
  const at::Tensor sink = at::empty({16}, key.front().options().dtype(at::kByte));
  for (std::size_t cache = 0; cache < key.size(); ++cache) {
    const auto misaligned = [](const at::Tensor& tensor) {
      return reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 != 0;
    };
    TORCH_CHECK(!misaligned(key[cache]) && !misaligned(value[cache]), "a cache is not aligned to 16 bytes");
  }
  Timing best = {std::numeric_limits<double>::infinity(), 0, 0};
  for (const unsigned threads : {128u, 256u, 512u}) {
    for (const unsigned blocks_each : {1u, 2u, 4u, 8u}) {
      if (threads * blocks_each > 2048) {
        continue; // more than one wave
      }
      const Call call = [&](std::int64_t cache) {
        const auto at = static_cast<std::size_t>(cache);
        launch_read(key[at].data_ptr(), value[at].data_ptr(), key[at].nbytes(), {processors * blocks_each, threads},
                    sink.data_ptr(), at::cuda::getCurrentCUDAStream());
        return at::Tensor(sink);
      };
      const Timing timing = time_in_graph(call, static_cast<std::int64_t>(key.size()), calls, true);
      best = timing.median < best.median ? timing : best;
    }
  }
  return best;
}

Timing time_empty() {
  const at::Tensor nothing = at::empty({0}, at::TensorOptions(at::kCUDA));
  return time_in_graph(
      [&](std::int64_t) {
        launch_empty(at::cuda::getCurrentCUDAStream());
        return at::Tensor(nothing);
      },
      1, 256, false);
}

} // namespace single_query::benchmark
