// single_query_benchmark: this library beside LibTorch's own attention, as a CSV.
#include "benchmark_implementations.h"
#include "benchmark_inputs.h"
#include "benchmark_problem.h"
#include "benchmark_results.h"
#include "benchmark_timing.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/Flags.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
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

// Keeps LibTorch's warnings, which tell why a backend refuses a problem, for the one line that reports it.
class WarningCollector : public c10::WarningHandler {
public:
  void process(const c10::Warning& warning) override {
    const std::string& text = warning.msg();
    // Beside the reason, LibTorch names every backend that select() has switched off.
    if (text.find("disabled") == std::string::npos && text.find("because") == std::string::npos) {
      text_ += (text_.empty() ? "" : "; ") + text;
    }
  }
  std::string take() { return std::exchange(text_, std::string()); }

private:
  std::string text_;
};

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// "NVIDIA H200" -> "nvidia-h200": for file names and for a column of a CSV.
std::string safe_name(const std::string& name) {
  std::string safe;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      safe += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (!safe.empty() && safe.back() != '-') {
      safe += '-';
    }
  }
  return safe.substr(0, safe.find_last_not_of('-') + 1);
}

std::string cpu_name() {
  std::string model = "cpu";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) {
      model = line.substr(line.find(':') + 1);
      break;
    }
  }
  return safe_name(model + " " + std::to_string(at::get_num_threads()) + " threads");
}

class Run {
public:
  Run(const std::string& path, at::Device device, double seconds)
      : device_(device), seconds_(seconds),
        device_name_(device.is_cuda() ? safe_name(at::cuda::getCurrentDeviceProperties()->name) : cpu_name()),
        file_(path) {}

  // Rows that do not fit into the time are named on standard error.
  void measure(const std::vector<Row>& rows) {
    std::size_t at = 0;
    for (const Row& row : rows) {
      ++at;
      title_ = std::string("[") + std::to_string(at) + "/" + std::to_string(rows.size()) + "] " + row.problem.name() +
               " " + mode_name(row.mode);
      if (seconds_since_start() > seconds_) {
        std::fprintf(stderr, "%s: left out, %g seconds are over\n", title_.c_str(), seconds_);
        continue;
      }
      attempt("inputs", [&] { measure(row); });
      if (device_.is_cuda()) {
        c10::cuda::CUDACachingAllocator::emptyCache();
      }
    }
    std::fprintf(stderr, "%zu results in %.0f s, written to %s\n", file_.results().size(), seconds_since_start(),
                 file_.path().c_str());
  }

  void measure_empty() {
    title_ = "empty kernel";
    Problem nothing;
    nothing.batch = nothing.query_heads = nothing.kv_heads = nothing.keys = nothing.head_dim = 0;
    attempt("empty", [&] { add("empty", {nothing, Mode::graph, false}, time_empty()); });
  }

  // Whether this library was wrong, or did not run, anywhere.
  bool failed() const { return failed_; }
  const std::vector<Result>& results() const { return file_.results(); }

private:
  double seconds_since_start() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  void measure(const Row& row) {
    const double memory_limit = device_.is_cuda() ? 24e9 : 2e9;
    const Inputs inputs = make_inputs(row.problem, device_, cold_bytes(), memory_limit);
    const Expected first = expected_output(row.problem, inputs, 0);
    const std::int64_t last_cache = inputs.caches() - 1;
    const Expected last = last_cache == 0 ? first : expected_output(row.problem, inputs, last_cache);

    std::vector<Implementation> correct;
    for (const Implementation& candidate : implementations(row.problem, inputs, row.mode)) {
      if (!candidate.ours && !row.peers) {
        continue;
      }
      const bool ran = attempt(candidate.name, [&] {
        candidate.select();
        std::string found;
        if (candidate.ours) {
          found = fault(first, candidate.call(0));
          found = found.empty() ? fault(last, candidate.call(last_cache)) : found;
        } else {
          found = gross_fault(first, candidate.call(0));
        }
        if (found.empty()) {
          correct.push_back(candidate);
          return;
        }
        failed_ = failed_ || candidate.ours;
        std::fprintf(stderr, "%s %s: WRONG, not timed: %s\n", title_.c_str(), candidate.name.c_str(), found.c_str());
      });
      failed_ = failed_ || (candidate.ours && !ran);
    }
    if (device_.is_cpu()) {
      const std::vector<Timing> timings = time_interleaved(correct, inputs.caches());
      for (std::size_t i = 0; i < correct.size(); ++i) {
        add(correct[i].name, row, timings[i]);
      }
      return;
    }
    for (const Implementation& implementation : correct) {
      const bool ran = attempt(implementation.name, [&] {
        implementation.select();
        if (implementation.outputs.defined()) {
          implementation.outputs.fill_(std::numeric_limits<double>::quiet_NaN());
        }
        const Timing timing = time(implementation, row, inputs.caches());
        if (implementation.outputs.defined()) { // what the graph computed, and not the calls before it
          const std::string found = fault(first, implementation.outputs[0]) + fault(last, implementation.outputs[-1]);
          TORCH_CHECK(found.empty(), "WRONG in a graph: ", found);
        }
        add(implementation.name, row, timing);
      });
      failed_ = failed_ || (implementation.ours && !ran);
    }
    const bool reads_everything = row.problem.uniform() && row.problem.window == 0;
    if (row.peers && row.mode == Mode::graph && reads_everything && !row.problem.warm) {
      attempt("read", [&] {
        const std::int64_t calls = calls_in_graph(row.problem.bytes(), inputs.caches());
        add("read", row, time_read(inputs.key, inputs.value, calls));
      });
    }
  }

  static Timing time(const Implementation& implementation, const Row& row, std::int64_t caches) {
    switch (row.mode) {
    case Mode::graph:
      return time_in_graph(implementation.call, caches, calls_in_graph(row.problem.bytes(), caches), !row.problem.warm);
    case Mode::eager:
      return time_eager(implementation.call, caches);
    case Mode::host:
      return time_on_host(implementation.call);
    }
    throw std::logic_error("Run::time: not a Mode");
  }

  void add(const std::string& implementation, const Row& row, const Timing& timing) {
    const Result result = make_result(implementation, device_name_, row, timing);
    file_.add(result);
    std::fprintf(stderr, "%s %s: %.2f us (%.2f .. %.2f), %.4g TB/s\n", title_.c_str(), implementation.c_str(),
                 result.microseconds, result.microseconds_min, result.microseconds_max, result.terabytes_per_second);
  }

  // What one implementation cannot do never ends the run; a GPU that no longer answers does.
  bool attempt(const std::string& what, const std::function<void()>& action) {
    warnings_.take();
    try {
      c10::WarningUtils::WarningHandlerGuard guard(&warnings_);
      action();
      return true;
    } catch (const std::exception& error) {
      const std::string reasons = warnings_.take();
      std::fprintf(stderr, "%s %s: no time: %s%s%s\n", title_.c_str(), what.c_str(), first_line(error.what()).c_str(),
                   reasons.empty() ? "" : ": ", first_line(reasons).c_str());
      if (device_.is_cuda()) {
        cudaGetLastError();
        C10_CUDA_CHECK(cudaDeviceSynchronize());
      }
      return false;
    }
  }

  at::Device device_;
  double seconds_;
  std::string device_name_;
  ResultFile file_;
  WarningCollector warnings_;
  std::string title_;
  bool failed_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

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
  const std::string name = (device.is_cuda() ? safe_name(at::cuda::getCurrentDeviceProperties()->name) : "cpu") +
                           (FLAGS_sweep ? "-sweep" : "") + (everything ? "" : "-partial") +
                           (FLAGS_check.empty() ? "" : "-check") + ".csv";
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
    std::fprintf(stderr, "single_query_benchmark: %s\n", first_line(error.what()).c_str());
    return exit_usage;
  }
}
