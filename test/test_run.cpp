// The main job says True for every input it takes, and takes none with which it would compare nothing.
#include "torch_case.h"

#include "run.h"

namespace single_query::test {
namespace {

RunOptions options_on(Device device) {
  RunOptions options;
  options.device = torch_device(device);
  return options;
}

std::string refusal(const RunOptions& options) {
  try {
    ::run(options);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

} // namespace

TEST_CASE("run() is True for the reference problem and its edges") {
  CHECK(::run());
  CHECK(::run(1));
  CHECK(::run(0));
  CHECK(::run(64, 1));
  CHECK(::run(1, 1));
  CHECK(::run(1000, 256));
}

TEST_ON_EACH_DEVICE("run() is True for a million keys") {
  RunOptions options = options_on(device);
  options.keys = 1000003;
  options.dim = 16;
  CHECK(::run(options));
}

TEST_ON_EACH_DEVICE("run() is True for every dtype, group and seed") {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const std::uint64_t seed : {0, 1, 2}) {
      RunOptions options = options_on(device);
      options.dtype = dtype;
      options.seed = seed;
      options.batch = 3;
      options.kv_heads = 2;
      options.heads = options.kv_heads * static_cast<std::int64_t>(seed + 1);
      options.keys = 333;
      options.dim = 80;
      CHECK(::run(options));
    }
  }
}

TEST_ON_EACH_DEVICE("run() refuses by name what it cannot compare") {
  const auto expect = [&](const std::string& name, const auto& spoil) {
    RunOptions options = options_on(device);
    spoil(options);
    const std::string message = refusal(options);
    INFO(message);
    CHECK(message.find(name + " is ") != std::string::npos);
  };
  expect("keys", [](RunOptions& options) { options.keys = -1; });
  expect("keys", [](RunOptions& options) { options.keys = std::int64_t{1} << 31; });
  expect("dim", [](RunOptions& options) { options.dim = 0; });
  expect("dim", [](RunOptions& options) { options.dim = 257; });
  expect("batch", [](RunOptions& options) { options.batch = 0; });
  expect("heads", [](RunOptions& options) { options.heads = 0; });
  expect("kv_heads", [](RunOptions& options) { options.kv_heads = -2; });
  expect("heads", [](RunOptions& options) {
    options.heads = 3;
    options.kv_heads = 2;
  });
  expect("dtype", [](RunOptions& options) { options.dtype = at::kDouble; });
  expect("device", [](RunOptions& options) { options.device = at::kMeta; });
}

TEST_CASE("run() refuses a CUDA device that is not there", "[gpu]") {
  RunOptions options;
  options.device = at::Device(at::kCUDA, 100);
  CHECK(refusal(options).find("device is cuda:100") != std::string::npos);
}

} // namespace single_query::test
