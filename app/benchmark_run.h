// One run of the benchmark: every row checked, then timed, then written.
#pragma once

#include "benchmark_problem.h"
#include "benchmark_results.h"

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace single_query::benchmark {

// "nvidia-h200": for file names and for a column of a CSV. A CPU comes with its number of threads.
std::string device_name(at::Device device);

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

class Run {
public:
  // Writes to `path`; begins no row after `seconds`. Progress, and why a time is missing, goes to standard error.
  Run(const std::string& path, at::Device device, double seconds);

  // Rows that do not fit into the time are named on standard error.
  void measure(const std::vector<Row>& rows);
  // An empty kernel as a graph node; for CUDA.
  void measure_empty();

  // Whether this library was wrong, or did not run, anywhere.
  bool failed() const { return failed_; }
  const std::vector<Result>& results() const { return file_.results(); }

private:
  double seconds_since_start() const;
  void measure(const Row& row);
  void add(const std::string& implementation, const Row& row, const Timing& timing);
  // What one implementation cannot do never ends the run; a GPU that no longer answers does.
  bool attempt(const std::string& what, const std::function<void()>& action);

  at::Device device_;
  double seconds_;
  std::string device_name_;
  ResultFile file_;
  WarningCollector warnings_;
  std::string title_;
  bool failed_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

} // namespace single_query::benchmark
