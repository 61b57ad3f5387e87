// single_query_fuzz: random configurations of attention against double, until one fails or all have passed.
#include "check_arguments.h"
#include "check_case.h"
#include "random_case.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

using namespace single_query;
using namespace single_query::test;

constexpr const char* usage = R"(single_query_fuzz: random configurations of attention against double

  --arguments      instead: random argument structs, of which the illegal ones have to be refused by name
  --count N        configurations to run (200)
  --seed N         of the first one; each later one's is one higher (1)
  --device NAME    cpu or cuda (cpu)
  --budget N       products of a query, a key and an element that one configuration may take (2000000)
  --case "LINE"    run the one configuration that a failure printed
  --keep-going     do not stop at the first failure

Exit status: 0 all passed, 1 a failure, 2 a wrong argument, 77 no GPU for --device cuda (1 where
SINGLE_QUERY_REQUIRE_GPU is set).
)";

struct Options {
  std::int64_t count = 200;
  std::uint64_t seed = 1;
  std::int64_t budget = 2'000'000;
  Device device = Device::cpu;
  std::string line;
  bool arguments = false;
  bool keep_going = false;
};

template <class Number>
bool read_number(const char* text, Number& number) {
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), number);
  return error == std::errc() && *end == 0;
}

bool read_options(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--keep-going" || name == "--arguments") {
      (name == "--arguments" ? options.arguments : options.keep_going) = true;
      continue;
    }
    if (++i == argc) {
      return false;
    }
    const std::string value = argv[i];
    bool good = false;
    if (name == "--count") {
      good = read_number(argv[i], options.count);
    } else if (name == "--seed") {
      good = read_number(argv[i], options.seed);
    } else if (name == "--budget") {
      good = read_number(argv[i], options.budget) && options.budget > 0;
    } else if (name == "--device") {
      options.device = value == "cuda" ? Device::cuda : Device::cpu;
      good = value == "cuda" || value == "cpu";
    } else if (name == "--case") {
      options.line = value;
      good = true;
    }
    if (!good) {
      return false;
    }
  }
  return true;
}

struct Totals {
  std::int64_t configurations = 0;
  std::int64_t failures = 0;
  std::int64_t over_gate = 0;
  double worst_hard = 0;
  double worst_gate = 0;
  double worst_lse = 0;
};

// One configuration; a failure, or an error past T2, prints the line that repeats it.
void run_one(const AttentionCase& attention_case, Device device, Totals& totals) {
  const Comparison comparison = check(attention_case, device);
  ++totals.configurations;
  totals.over_gate += comparison.worst_gate > 1;
  totals.worst_hard = std::max(totals.worst_hard, comparison.worst_hard);
  totals.worst_gate = std::max(totals.worst_gate, comparison.worst_gate);
  totals.worst_lse = std::max(totals.worst_lse, comparison.worst_lse);
  if (!comparison.passed()) {
    ++totals.failures;
    std::printf("FAILED: %s\n", comparison.failure.c_str());
  } else if (comparison.worst_gate > 1) {
    std::printf("over T2 by a factor of %.3f\n", comparison.worst_gate);
  } else {
    return;
  }
  std::printf("  --device %s --case \"%s\"\n", device == Device::cpu ? "cpu" : "cuda", to_line(attention_case).c_str());
  std::fflush(stdout);
}

int fuzz(const Options& options) {
  std::array<Totals, 3> totals; // by dtype
  std::int64_t failures = 0;
  const auto start = std::chrono::steady_clock::now();
  auto last_report = start;
  const std::int64_t count = options.line.empty() ? options.count : 1;
  for (std::int64_t i = 0; i < count && (failures == 0 || options.keep_going); ++i) {
    const AttentionCase attention_case = options.line.empty()
                                             ? random_case(options.seed + static_cast<std::uint64_t>(i), options.budget)
                                             : parse_case(options.line);
    Totals& of_dtype = totals[static_cast<std::size_t>(attention_case.dtype)];
    const std::int64_t failures_before = of_dtype.failures;
    run_one(attention_case, options.device, of_dtype);
    failures += of_dtype.failures - failures_before;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_report > std::chrono::seconds(5)) {
      last_report = now;
      const double seconds = std::chrono::duration<double>(now - start).count();
      std::fprintf(stderr, "%lld of %lld, %.0f a second, %lld failed\n", static_cast<long long>(i) + 1,
                   static_cast<long long>(count), static_cast<double>(i + 1) / seconds,
                   static_cast<long long>(failures));
    }
  }
  std::printf("%-9s %14s %9s %8s %13s %13s %14s\n", "dtype", "configurations", "failures", "over T2", "worst of T1",
              "worst of T2", "worst of lse's");
  const std::array<const char*, 3> names = {"float32", "float16", "bfloat16"};
  for (std::size_t i = 0; i < totals.size(); ++i) {
    const Totals& t = totals[i];
    std::printf("%-9s %14lld %9lld %8lld %13.4f %13.4f %14.4f\n", names[i], static_cast<long long>(t.configurations),
                static_cast<long long>(t.failures), static_cast<long long>(t.over_gate), t.worst_hard, t.worst_gate,
                t.worst_lse);
  }
  const std::int64_t over_gate = totals[0].over_gate + totals[1].over_gate + totals[2].over_gate;
  if (over_gate * 1000 > std::max<std::int64_t>(count, 1000)) {
    std::printf("FAILED: %lld of %lld configurations over T2; at most one in a thousand may be\n",
                static_cast<long long>(over_gate), static_cast<long long>(count));
    return 1;
  }
  return failures == 0 ? 0 : 1;
}

int fuzz_arguments(const Options& options) {
  ArgumentCounts counts;
  for (std::int64_t i = 0; i < options.count; ++i) {
    const std::uint64_t seed = options.seed + static_cast<std::uint64_t>(i);
    const std::string failure = check_random_arguments(seed, counts);
    if (!failure.empty()) {
      std::printf("FAILED: %s\n  --arguments --count 1 --seed %llu\n", failure.c_str(),
                  static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  std::printf("%lld argument structs: %lld refused by name, %lld computed, %lld legal but not over memory of ours\n",
              static_cast<long long>(options.count), static_cast<long long>(counts.refused),
              static_cast<long long>(counts.computed), static_cast<long long>(counts.accepted_only));
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  Options options;
  if (!read_options(argc, argv, options)) {
    std::fputs(usage, stderr);
    return 2;
  }
  if (options.arguments) {
    return fuzz_arguments(options);
  }
  int devices = 0;
  if (options.device == Device::cuda && (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)) {
    std::fputs("single_query_fuzz: no CUDA device\n", stderr);
    const char* required = std::getenv("SINGLE_QUERY_REQUIRE_GPU");
    return required != nullptr && *required != 0 && std::strcmp(required, "0") != 0 ? 1 : 77;
  }
  try {
    return fuzz(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "single_query_fuzz: %s\n", error.what());
    return 2;
  }
}
