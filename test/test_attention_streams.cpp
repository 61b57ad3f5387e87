// Calls from many threads, on many streams, in graphs and beside failures give the bits they give alone.
#include "each_device.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace single_query::test {
namespace {

// Small and large, tiny path, splits, pages and features.
const std::vector<std::string> mixed_shapes = {
    "keys=64 head_dim=32",
    "batch=2 query_heads=8 kv_heads=2 keys=700 head_dim=64 dtype=bfloat16",
    "query_heads=8 kv_heads=2 keys=9000 head_dim=128 dtype=float16",
    "batch=3 query_heads=6 kv_heads=3 keys=300 head_dim=45 lengths=b sinks=h",
    "batch=4 query_heads=16 kv_heads=2 keys=2000 head_dim=64 dtype=bfloat16 lengths=b page_size=16 page_table=bp",
    "batch=30 query_heads=8 kv_heads=8 keys=100 head_dim=128 dtype=bfloat16 window=64 softcap=20"};

std::vector<std::unique_ptr<AttentionData>> mixed_data() {
  std::vector<std::unique_ptr<AttentionData>> data;
  for (const std::string& shape : mixed_shapes) {
    data.push_back(std::make_unique<AttentionData>(parse_case(shape)));
  }
  return data;
}

bool same_result(const Result& a, const Result& b) {
  return same_rows(a, 0, b, 0, a.rows);
}

// A stream with a workspace of its own, and every shape placed for it.
struct Lane {
  explicit Lane(const std::vector<std::unique_ptr<AttentionData>>& data) {
    for (const auto& each : data) {
      placements.push_back(std::make_unique<Placement>(*each, Device::cuda));
      workspace.at_least(attention_workspace_bytes(placements.back()->problem));
    }
  }
  void launch(std::size_t shape) { test::launch(placements[shape]->problem, stream, workspace); }

  Stream stream;
  CudaWorkspace workspace;
  std::vector<std::unique_ptr<Placement>> placements;
};

// A lane that copies every call's output aside and compares it with the expected one before the copies' space runs out.
class CheckedLane {
public:
  CheckedLane(const std::vector<std::unique_ptr<AttentionData>>& data, const std::vector<Result>& expected)
      : lane_(data), expected_(expected) {
    for (const Result& result : expected) {
      largest_ = std::max(largest_, result.output.size());
    }
    require_cuda(cudaMallocHost(reinterpret_cast<void**>(&copies_), most_pending * largest_));
  }
  CheckedLane(const CheckedLane&) = delete;
  CheckedLane& operator=(const CheckedLane&) = delete;
  ~CheckedLane() { cudaFreeHost(copies_); }

  void delay() { lane_.stream.delay(1); }
  void call(std::size_t shape) {
    void* output = lane_.placements[shape]->problem.output; // dense in all shapes
    const std::size_t bytes = expected_[shape].output.size();
    require_cuda(cudaMemsetAsync(output, 0xff, bytes, lane_.stream.get()));
    lane_.launch(shape);
    std::byte* copy = copies_ + pending_.size() * largest_;
    require_cuda(cudaMemcpyAsync(copy, output, bytes, cudaMemcpyDeviceToHost, lane_.stream.get()));
    pending_.push_back(shape);
    if (pending_.size() == most_pending) {
      compare();
    }
  }
  void compare() {
    lane_.stream.wait();
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      const std::vector<std::byte>& output = expected_[pending_[i]].output;
      wrong_ += !std::equal(output.begin(), output.end(), copies_ + i * largest_);
    }
    pending_.clear();
  }
  int wrong() const { return wrong_; }

private:
  static constexpr std::size_t most_pending = 32;

  Lane lane_;
  const std::vector<Result>& expected_;
  std::size_t largest_ = 0;
  std::byte* copies_ = nullptr; // [most_pending, largest_]
  std::vector<std::size_t> pending_;
  int wrong_ = 0;
};

} // namespace

TEST_CASE("Host threads calling at once get the bits of a call alone, on the CPU") {
  const auto data = mixed_data();
  std::vector<Result> expected;
  for (const auto& each : data) {
    expected.push_back(run(*each, Device::cpu));
  }
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (std::size_t i = 0; i < 12; ++i) {
        const std::size_t shape = (i + caller) % data.size();
        Placement placement(*data[shape], Device::cpu);
        call(placement.problem, Device::cpu, {Fill::nan, caller % 2 == 0 ? ParallelFor() : threads(2)});
        wrong += !same_result(placement.results(), expected[shape]);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  CHECK(wrong == 0);
}

TEST_CASE("8 threads with 4 streams each make 10,000 calls of mixed shapes with the bits of a call alone", "[gpu]") {
  const auto data = mixed_data();
  std::vector<Result> expected;
  for (const auto& each : data) {
    expected.push_back(run(*each, Device::cuda));
  }
  std::size_t free_before = 0;
  std::size_t total = 0;
  const auto work = [&](int calls) {
    std::atomic<int> wrong = 0;
    std::vector<std::thread> callers;
    for (unsigned caller = 0; caller < 8; ++caller) {
      callers.emplace_back([&, caller] {
        Random random(caller);
        std::vector<std::unique_ptr<CheckedLane>> lanes;
        for (int i = 0; i < 4; ++i) {
          lanes.push_back(std::make_unique<CheckedLane>(data, expected));
        }
        for (int i = 0; i < calls; ++i) {
          CheckedLane& lane = *lanes[random.bits() % 4];
          if (random.chance(0.002)) {
            lane.delay();
          }
          lane.call(random.bits() % data.size());
        }
        for (auto& lane : lanes) {
          lane->compare();
          wrong += lane->wrong();
        }
      });
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    return wrong.load();
  };
  CHECK(work(10) == 0); // whatever the driver sets up once
  require_cuda(cudaMemGetInfo(&free_before, &total));
  CHECK(work(10'000) == 0);
  std::size_t free_after = 0;
  require_cuda(cudaMemGetInfo(&free_after, &total));
  CHECK(free_after >= free_before);
}

TEST_CASE("A14: the device that is current is the one that computes, and stays current", "[gpu]") {
  int devices = 0;
  require_cuda(cudaGetDeviceCount(&devices));
  if (devices < 2) {
    WARN("not run: needs a second GPU");
    return;
  }
  const AttentionData data(
      parse_case("dtype=float16 query_heads=32 kv_heads=32 keys=2048 head_dim=128 scale=0.0883883461"));
  const Result expected = run(data, Device::cuda);
  require_cuda(cudaSetDevice(1));
  {
    const Stream stream;
    CudaWorkspace workspace;
    Placement placement(data, Device::cuda);
    launch(placement.problem, stream, workspace);
    stream.wait();
    CHECK(same_result(placement.results(), expected));
    int current = -1;
    require_cuda(cudaGetDevice(&current));
    CHECK(current == 1);
  }
  require_cuda(cudaSetDevice(0));
  CHECK(same_result(run(data, Device::cuda), expected));
}

TEST_CASE("A15: the launch goes to the stream it is given", "[gpu]") {
  AttentionData data(parse_case("query_heads=4 keys=64 head_dim=32"));
  AttentionData before(data.attention_case());
  for (std::int64_t h = 0; h < 4; ++h) {
    for (std::int64_t d = 0; d < 32; ++d) {
      before.set_query(0, h, d, -1);
    }
  }
  const Result expected = run(data, Device::cuda);
  Placement placement(before, Device::cuda);
  const GuardedBuffer& query = data.buffer(Tensor::query);
  auto* first = static_cast<std::byte*>(const_cast<void*>(placement.problem.query));
  const std::size_t bytes = 4 * 32 * sizeof(float);
  std::byte* pinned = nullptr;
  require_cuda(cudaMallocHost(reinterpret_cast<void**>(&pinned), 2 * bytes));
  std::copy_n(query.data(), bytes, pinned);
  int right = 0;
  for (int i = 0; i < 100; ++i) {
    require_cuda(cudaMemset(first, 0, bytes)); // the query of old
    placement.poison_results(Fill::nan);
    require_cuda(cudaDeviceSynchronize());
    shared_stream().delay(20);
    require_cuda(cudaMemcpyAsync(first, pinned, bytes, cudaMemcpyHostToDevice, shared_stream().get()));
    launch(placement.problem, shared_stream(), shared_workspace());
    require_cuda(cudaMemcpyAsync(pinned + bytes, placement.problem.output, bytes, cudaMemcpyDeviceToHost,
                                 shared_stream().get()));
    shared_stream().wait();
    right += std::equal(expected.output.begin(), expected.output.end(), pinned + bytes);
  }
  cudaFreeHost(pinned);
  CHECK(right == 100);
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
  std::string message;
  try {
    launch(placement.problem, stream, shared_workspace());
  } catch (const Error& error) {
    CHECK(error.kind() == Error::Kind::cuda);
    message = error.what();
  }
  INFO(message);
  CHECK(message.find("cudaErrorStreamCaptureInvalidated") != std::string::npos);
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

TEST_CASE("A36: two streams with a workspace each do not disturb each other", "[gpu]") {
  std::vector<std::unique_ptr<AttentionData>> data;
  for (const char* seed : {"1", "2"}) {
    data.push_back(std::make_unique<AttentionData>(
        parse_case(std::string("dtype=bfloat16 batch=4 query_heads=8 kv_heads=2 keys=8192 head_dim=64 seed=") + seed)));
  }
  const std::vector<Result> expected = {run(*data[0], Device::cuda), run(*data[1], Device::cuda)};
  Lane first(data);
  Lane second(data);
  int right = 0;
  for (std::size_t i = 0; i < 100; ++i) {
    const std::size_t shape = i % 2;
    first.placements[shape]->poison_results(Fill::nan);
    second.placements[1 - shape]->poison_results(Fill::nan);
    require_cuda(cudaDeviceSynchronize());
    first.launch(shape);
    second.launch(1 - shape);
    first.stream.wait();
    second.stream.wait();
    right += same_result(first.placements[shape]->results(), expected[shape]) &&
             same_result(second.placements[1 - shape]->results(), expected[1 - shape]);
  }
  CHECK(right == 100);
}

TEST_CASE("Two graphs of one shape replayed at once on two streams give the bits of a call alone", "[gpu]") {
  const auto data = mixed_data();
  for (std::size_t shape = 0; shape < data.size(); ++shape) {
    const Result expected = run(*data[shape], Device::cuda);
    Lane first(data);
    Lane second(data);
    const Graph first_graph(first.stream, [&] { first.launch(shape); });
    const Graph second_graph(second.stream, [&] { second.launch(shape); });
    for (int i = 0; i < 20; ++i) {
      first_graph.replay(first.stream);
      second_graph.replay(second.stream);
    }
    first.stream.wait();
    second.stream.wait();
    CHECK(same_result(first.placements[shape]->results(), expected));
    CHECK(same_result(second.placements[shape]->results(), expected));
  }
}

TEST_CASE("A41: a graph captured at length 1 gives at every length the bits of an eager call", "[gpu]") {
  for (const char* dtype : {"dtype=float32 ", "dtype=float16 ", "dtype=bfloat16 "}) {
    for (const char* shape :
         {"query_heads=8 kv_heads=2 keys=8192 head_dim=128", "batch=3 query_heads=4 kv_heads=4 keys=8192 head_dim=64",
          "query_heads=8 kv_heads=1 keys=8192 head_dim=128 page_size=16 page_table=bp",
          "batch=2 query_heads=3 keys=8192 head_dim=40 window=500 sinks=h alibi=bh", "keys=8192 head_dim=32"}) {
      AttentionData data(parse_case(std::string(dtype) + shape +
                                    " lengths=b length_kind=full scale=0.1 key_magnitude=4 fill=byte_7f"));
      data.set_length(0, 1);
      Placement placement(data, Device::cuda);
      const Graph graph(shared_stream(), [&] { launch(placement.problem, shared_stream(), shared_workspace()); });
      for (const std::int64_t length : {1, 2, 129, 4097, 8192, 0, 77}) {
        data.set_length(0, length);
        placement.upload(Tensor::lengths);
        placement.poison_results(Fill::nan);
        call(placement.problem, Device::cuda);
        const Result eager = placement.results();
        placement.poison_results(Fill::infinity);
        graph.replay(shared_stream());
        shared_stream().wait();
        INFO(to_line(data.attention_case()) << " at length " << length);
        CHECK(same_result(placement.results(), eager));
        if (data.attention_case().window == 0) { // what a window left out of the full length holds poison
          const Comparison comparison =
              compare(eager, reference(data.host_problem()), eager.dtype, weights_on(Device::cuda, eager.dtype));
          INFO(comparison.failure);
          CHECK(comparison.passed());
        }
      }
    }
  }
}

TEST_CASE("A42: the first call of a process may be captured, and one that is refused leaves the capture whole",
          "[gpu]") {
  // Run alone this is the process's first call.
  const AttentionData data(parse_case("dtype=bfloat16 query_heads=8 kv_heads=2 keys=5000 head_dim=128 scale=0.1"));
  Placement placement(data, Device::cuda);
  placement.poison_results(Fill::nan);
  const Stream stream;
  CudaWorkspace workspace;
  workspace.at_least(attention_workspace_bytes(placement.problem));
  const Graph graph(stream, [&] {
    AttentionProblem bad = placement.problem;
    bad.kv_heads = 3;
    CHECK_THROWS_AS(launch(bad, stream, workspace), Error);
    launch(placement.problem, stream, workspace);
  });
  graph.replay(stream);
  stream.wait();
  const Result replayed = placement.results();
  CHECK(compare(replayed, reference(data.host_problem()), DataType::bfloat16, Weights::rounded).passed());
  CHECK(same_result(run(data, Device::cuda), replayed));
}

} // namespace single_query::test
