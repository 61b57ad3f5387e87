// single_query_benchmark: this library beside LibTorch's own attention, as a CSV.
#include "benchmark_problem.h"
#include "benchmark_results.h"
#include "benchmark_run.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Flags.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

C10_DEFINE_string(rows, "all",
                  "Groups of rows, separated by commas: host, float32, latency, large, paged, features, cpu, or all: "
                  "everything for the GPU, or cpu where there is none.");
C10_DEFINE_string(filter, "",
                  "Only rows with this text in their name, as progress shows it: '16 32/8 4096x128', 'float16'.");
C10_DEFINE_bool(sweep, false, "Points in which a cliff would show, instead of rows.");
C10_DEFINE_string(
    check, "",
    "A CSV of an earlier run: fail, by name, for each ratio to a LibTorch peer that became over 10 % worse.");
C10_DEFINE_string(
    output, "",
    "The CSV to write. Default: <device>.csv, in app/results if that folder is there, else in the current "
    "one; with -sweep, -partial or -check behind <device> for a sweep, some of the rows, or a check.");
C10_DEFINE_string(seconds, "", "Begin no row after so many seconds. Default: 280, for a sweep 450, on the CPU 900.");

namespace single_query::benchmark {
namespace {

constexpr int exit_good = 0;
constexpr int exit_wrong = 1; // a wrong result, or a ratio that became worse
constexpr int exit_usage = 2; // usage or environment

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) {
    words.push_back(word);
  }
  return words;
}

// The rows that the flags ask for, each once. Throws std::invalid_argument, naming the flag.
std::vector<Row> wanted_rows(bool cuda) {
  std::vector<Row> candidates;
  if (FLAGS_sweep) {
    candidates = sweep_rows();
  } else {
    std::vector<std::string> groups = split(FLAGS_rows);
    if (FLAGS_rows == "all") {
      groups = group_names();
      std::erase_if(groups, [&](const std::string& group) { return (group == "cpu") == cuda; });
    } else if (groups.size() > 1 && std::find(groups.begin(), groups.end(), "cpu") != groups.end()) {
      throw std::invalid_argument("--rows: cpu stands alone, because it has a file of its own; it was '" + FLAGS_rows +
                                  "'");
    }
    for (const std::string& group : groups) {
      const std::vector<Row> rows = rows_of_group(group);
      candidates.insert(candidates.end(), rows.begin(), rows.end());
    }
  }
  std::set<std::string> seen;
  std::vector<Row> rows;
  for (const Row& row : candidates) {
    const std::string name = row.problem.name() + " " + mode_name(row.mode);
    if (name.find(FLAGS_filter) != std::string::npos && seen.insert(name).second) {
      rows.push_back(row);
    }
  }
  if (rows.empty()) {
    throw std::invalid_argument("--rows, --filter: no row of '" + FLAGS_rows + "' has '" + FLAGS_filter +
                                "' in its name");
  }
  return rows;
}

std::string output_path(at::Device device) {
  if (!FLAGS_output.empty()) {
    std::error_code ignored; // one of them is not there yet
    if (std::filesystem::equivalent(FLAGS_output, FLAGS_check, ignored)) {
      throw std::invalid_argument("--output, --check: '" + FLAGS_output +
                                  "' would be overwritten by what it is to judge");
    }
    return FLAGS_output;
  }
  const bool everything = FLAGS_filter.empty() && (FLAGS_sweep || FLAGS_rows == "all" || FLAGS_rows == "cpu");
  const std::string name = (device.is_cuda() ? device_name(device) : "cpu") + (FLAGS_sweep ? "-sweep" : "") +
                           (everything ? "" : "-partial") + (FLAGS_check.empty() ? "" : "-check") + ".csv";
  return std::filesystem::is_directory("app/results") ? "app/results/" + name : name;
}

int check(const std::vector<Result>& now, const std::vector<Result>& then) {
  const Comparison comparison = compare(now, then);
  for (const std::string& name : comparison.worse) {
    std::fprintf(stderr, "WORSE %s\n", name.c_str());
  }
  std::fprintf(stderr, "%d ratios to LibTorch peers compared with %s: %zu over 10 %% worse\n", comparison.compared,
               FLAGS_check.c_str(), comparison.worse.size());
  if (comparison.compared == 0) {
    throw std::runtime_error("--check: '" + FLAGS_check + "' has no ratio of this run: another device, or other rows?");
  }
  return comparison.worse.empty() ? exit_good : exit_wrong;
}

double seconds_to_run(bool cuda) {
  if (FLAGS_seconds.empty()) {
    return !cuda ? 900 : FLAGS_sweep ? 450 : 280;
  }
  char* end = nullptr;
  const double seconds = std::strtod(FLAGS_seconds.c_str(), &end);
  if (*end != '\0' || !(seconds > 0)) {
    throw std::invalid_argument("--seconds: a number above 0 is allowed; it was '" + FLAGS_seconds + "'");
  }
  return seconds;
}

int run() {
  const bool only_cpu = !FLAGS_sweep && FLAGS_rows == "cpu";
  const bool cuda = !only_cpu && at::cuda::is_available();
  const std::vector<Row> rows = wanted_rows(cuda);
  if (!cuda && (FLAGS_sweep || (FLAGS_rows != "cpu" && FLAGS_rows != "all"))) {
    throw std::invalid_argument("--rows, --sweep: there is no CUDA device; without one, --rows cpu is allowed");
  }
  const double seconds = seconds_to_run(cuda);
  // Read first: a run of minutes must not end at a file that was never there.
  const std::vector<Result> then = FLAGS_check.empty() ? std::vector<Result>() : read_results(FLAGS_check);

  const c10::InferenceMode inference;
  at::globalContext().setAllowTF32CuBLAS(false);
  at::manual_seed(0);
  c10::cuda::OptionalCUDAStreamGuard stream;
  if (cuda) {
    stream.reset_stream(at::cuda::getStreamFromPool()); // a graph cannot be captured on the default stream
  }
  const at::Device device(cuda ? at::kCUDA : at::kCPU);
  std::fprintf(stderr, "LibTorch %s, CUDA %d.%d, %s\n", TORCH_VERSION, CUDART_VERSION / 1000,
               CUDART_VERSION % 1000 / 10, device_name(device).c_str());
  Run benchmark(output_path(device), device, seconds);
  if (cuda) {
    benchmark.measure_empty();
  }
  benchmark.measure(rows);
  const int checked = FLAGS_check.empty() ? exit_good : check(benchmark.results(), then);
  return benchmark.failed() ? exit_wrong : checked;
}

// LibTorch's flags want a value after every name; --sweep alone is --sweep=true.
bool parse_flags(int argc, char** argv) {
  std::string sweep = "--sweep=true";
  for (int i = 1; i < argc; ++i) {
    argv[i] = std::string(argv[i]) == "--sweep" ? sweep.data() : argv[i];
  }
  c10::SetUsageMessage(
      "Times attention of one query beside LibTorch's own, checks each result against double first, and "
      "writes a CSV.\nExit status: 0; 1 where this library was wrong or --check found a ratio worse; "
      "2 for a usage or environment error.\n"
      "The flags of this program are rows, filter, sweep, check, output and seconds; the others below are "
      "LibTorch's.");
  const bool known = c10::ParseCommandLineFlags(&argc, &argv);
  if (known && argc > 1) {
    std::fprintf(stderr, "single_query_benchmark: there are no arguments but flags; it was '%s'\n", argv[1]);
  }
  return known && argc == 1;
}

} // namespace
} // namespace single_query::benchmark

int main(int argc, char** argv) {
  using namespace single_query::benchmark;
  try {
    return parse_flags(argc, argv) ? run() : exit_usage;
  } catch (const std::exception& error) {
    const std::string message = error.what(); // LibTorch's goes on with a stack trace
    std::fprintf(stderr, "single_query_benchmark: %s\n", message.substr(0, message.find('\n')).c_str());
    return exit_usage;
  }
}
