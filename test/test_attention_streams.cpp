// Calls from many threads, on many streams, in graphs and beside failures give the bits they give alone.
#include "device_kernels.h"
#include "each_device.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

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
  data.reserve(mixed_shapes.size());
  for (const std::string& shape : mixed_shapes) {
    data.push_back(std::make_unique<AttentionData>(parse_case(shape)));
  }
  return data;
}

std::vector<Result> results_alone(const std::vector<std::unique_ptr<AttentionData>>& data, Device device) {
  std::vector<Result> results;
  results.reserve(data.size());
  for (const auto& each : data) {
    results.push_back(run(*each, device));
  }
  return results;
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

// A lane whose results the GPU itself compares with the expected ones, call by call, so that the host never waits.
class CheckedLane {
public:
  CheckedLane(const std::vector<std::unique_ptr<AttentionData>>& data, const std::vector<Result>& expected)
      : lane_(data), wrong_(Device::cuda, sizeof(unsigned)) {
    for (std::size_t shape = 0; shape < data.size(); ++shape) {
      const std::vector<std::byte>& output = expected[shape].output;
      Memory& query = queries_.emplace_back(Device::cuda, output.size()); // dense in all shapes, as the output is
      query.upload(data[shape]->buffer(Tensor::query).data(), query.size());
      const std::vector<float>& lse = expected[shape].lse;
      outputs_.emplace_back(Device::cuda, output.size()).upload(output.data(), output.size());
      lses_.emplace_back(Device::cuda, lse.size() * sizeof(float)).upload(lse.data(), lse.size() * sizeof(float));
      require_cuda(cudaMemset(lane_.placements[shape]->problem.output, 0xff, output.size()));
    }
    require_cuda(cudaMemset(wrong_.data(), 0, wrong_.size()));
    require_cuda(cudaDeviceSynchronize());
  }

  void call(std::size_t shape) {
    lane_.launch(shape);
    const AttentionProblem& problem = lane_.placements[shape]->problem;
    const auto compare = [&](void* result, const Memory& expected) {
      compare_and_poison(lane_.stream.get(), result, expected.data(), expected.size(),
                         reinterpret_cast<unsigned*>(wrong_.data()));
    };
    compare(problem.output, outputs_[shape]);
    compare(problem.lse, lses_[shape]);
  }
  // A call whose query is NaN until shortly before it.
  void late_call(std::size_t shape) {
    void* const query = const_cast<void*>(lane_.placements[shape]->problem.query);
    const Memory& right = queries_[shape];
    require_cuda(cudaMemsetAsync(query, 0xff, right.size(), lane_.stream.get()));
    lane_.stream.delay(1);
    require_cuda(cudaMemcpyAsync(query, right.data(), right.size(), cudaMemcpyDeviceToDevice, lane_.stream.get()));
    call(shape);
  }
  unsigned wrong() const {
    lane_.stream.wait();
    unsigned wrong = 0;
    wrong_.download(&wrong, sizeof(wrong));
    return wrong;
  }

private:
  Lane lane_;
  std::vector<Memory> queries_; // by shape
  std::vector<Memory> outputs_; // by shape: the expected ones
  std::vector<Memory> lses_;
  Memory wrong_; // one unsigned: results that were wrong
};

} // namespace

TEST_CASE("Host threads calling at once get the bits of a call alone, on the CPU") {
  const auto data = mixed_data();
  const std::vector<Result> expected = results_alone(data, Device::cpu);
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

TEST_CASE("10,000 calls of mixed shapes on each of 4 streams of 8 threads give the bits of a call alone",
          "[gpu][large]") {
  const auto data = mixed_data();
  const std::vector<Result> expected = results_alone(data, Device::cuda);
  const auto work = [&](int calls) {
    std::atomic<unsigned> wrong = 0;
    std::vector<std::thread> callers;
    for (unsigned caller = 0; caller < 8; ++caller) {
      callers.emplace_back([&, caller] {
        Random random(caller);
        std::vector<std::unique_ptr<CheckedLane>> lanes;
        lanes.reserve(4);
        for (int i = 0; i < 4; ++i) {
          lanes.push_back(std::make_unique<CheckedLane>(data, expected));
        }
        for (int i = 0; i < calls; ++i) {
          for (const auto& lane : lanes) {
            const std::size_t shape = random.bits() % data.size();
            i == 0 || random.chance(0.002) ? lane->late_call(shape) : lane->call(shape);
          }
        }
        for (const auto& lane : lanes) {
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
  std::size_t free_before = 0;
  std::size_t free_after = 0;
  std::size_t total = 0;
  require_cuda(cudaMemGetInfo(&free_before, &total));
  CHECK(work(10'000) == 0);
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
  const int times = repetitions(100);
  int right = 0;
  for (int i = 0; i < times; ++i) {
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
  CHECK(right == times);
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
  const int times = repetitions(100);
  int right = 0;
  for (int i = 0; i < times; ++i) {
    const std::size_t shape = static_cast<std::size_t>(i % 2);
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
  CHECK(right == times);
}

// Started by the test below.
TEST_CASE("A second process on the GPU", "[.second_process][gpu]") {
  const auto data = mixed_data();
  for (const auto& each : data) {
    expect_pass(*each, Device::cuda);
  }
  const std::vector<Result> expected = results_alone(data, Device::cuda);
  CheckedLane lane(data, expected);
  for (std::size_t i = 0; i < 20'000; ++i) {
    lane.call(i % data.size());
  }
  CHECK(lane.wrong() == 0);
}

TEST_CASE("Two processes on one GPU get the bits of a call alone", "[gpu][large]") {
  const auto data = mixed_data();
  const std::vector<Result> expected = results_alone(data, Device::cuda);
  CheckedLane lane(data, expected);
  std::string self = "/proc/self/exe";
  std::string test = "[second_process]";
  char* const arguments[] = {self.data(), test.data(), nullptr};
  pid_t second = 0;
  REQUIRE(posix_spawn(&second, self.c_str(), nullptr, nullptr, arguments, environ) == 0);
  int status = -1;
  while (waitpid(second, &status, WNOHANG) == 0) { // all that it does, it does beside these
    for (std::size_t i = 0; i < 60; ++i) {
      lane.call(i % data.size());
    }
    CHECK(lane.wrong() == 0);
  }
  CHECK(status == 0);
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
      shared_workspace().at_least(attention_workspace_bytes(placement.problem)); // it cannot grow inside a capture
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

// CTest also runs it alone, as the first call of a process.
TEST_CASE("A42: the first call of a process may be captured, and one that is refused leaves the capture whole",
          "[gpu][first_call]") {
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
  placement.poison_results(Fill::infinity);
  launch(placement.problem, stream, workspace); // the stream is as good as before
  stream.wait();
  CHECK(same_result(placement.results(), replayed));
}

} // namespace single_query::test
