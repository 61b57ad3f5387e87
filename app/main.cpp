// Prints True or False, alone on standard output. Exit status: 0 True, 1 False, 2 nothing could be compared.
#include "run.h"

#include <c10/util/Exception.h>
#include <c10/util/Flags.h>

#include <charconv>
#include <iostream>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

// Numbers are strings here because LibTorch's flags take "5x" for 5 and "abc" for 0.
C10_DEFINE_string(keys, "64", "number of keys and values");
C10_DEFINE_string(dim, "32", "head_dim");
C10_DEFINE_string(dtype, "float32", "float32, float16 or bfloat16");
C10_DEFINE_string(batch, "1", "number of sequences");
C10_DEFINE_string(heads, "1", "query heads");
C10_DEFINE_string(kv_heads, "1", "key/value heads");
C10_DEFINE_string(device, "auto", "auto, cpu, cuda or cuda:<index>");
C10_DEFINE_string(seed, "0", "of the random inputs");

namespace {

constexpr const char* usage = R"(usage: single_query [--option=value ...]

Computes attention of random queries against N random keys and values with single_query, compares the result with
LibTorch's matmul and softmax, and prints True or False (exit status 0 or 1; 2: bad usage or no such device).

  --keys=N        keys and values, 0 or more                  (64)
  --dim=D         head_dim, 1 to 256                          (32)
  --dtype=TYPE    float32, float16 or bfloat16                (float32)
  --batch=B       sequences, 1 or more                        (1)
  --heads=Hq      query heads, a multiple of kv_heads         (1)
  --kv_heads=Hkv  key/value heads, 1 or more                  (1)
  --device=NAME   cpu, cuda, cuda:<index>; auto: a GPU if any (auto)
  --seed=NUMBER   of the random inputs                        (0)
  --help          this text
)";

template <typename Integer>
Integer number(const char* name, const std::string& text) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::invalid_argument(std::string("--") + name + " is \"" + text + "\": it must be a whole number");
  }
  return value;
}

c10::ScalarType scalar_type(const std::string& text) {
  if (text == "float32") {
    return c10::ScalarType::Float;
  }
  if (text == "float16") {
    return c10::ScalarType::Half;
  }
  if (text == "bfloat16") {
    return c10::ScalarType::BFloat16;
  }
  throw std::invalid_argument("--dtype is \"" + text + "\": it must be float32, float16 or bfloat16");
}

c10::Device device(const std::string& text) {
  if (text == "auto") {
    return default_device();
  }
  if (text == "cpu" || text == "cuda") {
    return c10::Device(text);
  }
  constexpr std::string_view prefix = "cuda:";
  if (text.starts_with(prefix)) {
    const std::int64_t index = number<std::int64_t>("device", text.substr(prefix.size()));
    if (index >= 0 && index < std::numeric_limits<c10::DeviceIndex>::max()) {
      return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
    }
  }
  throw std::invalid_argument("--device is \"" + text + "\": it must be auto, cpu, cuda or cuda:<index>");
}

RunOptions options_from(int argc, char** argv) {
  if (!c10::ParseCommandLineFlags(&argc, &argv)) {
    std::cerr << "\n"; // LibTorch named the option, and may not have ended its line
    throw std::invalid_argument("unknown option, or one without a value: --help lists them");
  }
  if (argc > 1) {
    throw std::invalid_argument(std::string("unexpected argument \"") + argv[1] + "\"");
  }
  RunOptions options;
  options.keys = number<std::int64_t>("keys", FLAGS_keys);
  options.dim = number<std::int64_t>("dim", FLAGS_dim);
  options.batch = number<std::int64_t>("batch", FLAGS_batch);
  options.heads = number<std::int64_t>("heads", FLAGS_heads);
  options.kv_heads = number<std::int64_t>("kv_heads", FLAGS_kv_heads);
  options.dtype = scalar_type(FLAGS_dtype);
  options.seed = number<std::uint64_t>("seed", FLAGS_seed);
  options.device = device(FLAGS_device);
  return options;
}

} // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--help") { // LibTorch's own answer lists its own flags too
      std::cout << usage;
      return 0;
    }
  }
  try {
    const bool close = run(options_from(argc, argv));
    std::cout << (close ? "True" : "False") << std::endl;
    return close ? 0 : 1;
  } catch (const c10::Error& error) {
    std::cerr << "single_query: " << error.what_without_backtrace() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "single_query: " << error.what() << "\n";
    return 2;
  }
}
