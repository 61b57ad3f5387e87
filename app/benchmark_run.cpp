#include "benchmark_run.h"

#include "benchmark_implementations.h"
#include "benchmark_inputs.h"
#include "benchmark_timing.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <cctype>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace single_query::benchmark {
namespace {

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// "NVIDIA H200" -> "nvidia-h200"
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

Timing time(const Implementation& implementation, const Row& row, std::int64_t caches) {
  switch (row.mode) {
  case Mode::graph:
    return time_in_graph(implementation.call, caches, calls_in_graph(row.problem.bytes(), caches), !row.problem.warm);
  case Mode::eager:
    return time_eager(implementation.call, caches);
  case Mode::host:
    return time_on_host(implementation.call);
  }
  throw std::logic_error("time: not a Mode");
}

} // namespace

std::string device_name(at::Device device) {
  return device.is_cuda() ? safe_name(at::cuda::getCurrentDeviceProperties()->name) : cpu_name();
}

Run::Run(const std::string& path, at::Device device, double seconds)
    : device_(device), seconds_(seconds), device_name_(device_name(device)), file_(path) {}

void Run::measure(const std::vector<Row>& rows) {
  std::size_t at = 0;
  for (const Row& row : rows) {
    ++at;
    std::ostringstream title;
    title << '[' << at << '/' << rows.size() << "] " << row.problem.name() << ' ' << mode_name(row.mode);
    title_ = title.str();
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

void Run::measure_empty() {
  title_ = "empty kernel";
  Problem nothing;
  nothing.batch = nothing.query_heads = nothing.kv_heads = nothing.keys = nothing.head_dim = 0;
  attempt("empty", [&] { add("empty", {nothing, Mode::graph, false}, time_empty()); });
}

double Run::seconds_since_start() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Run::measure(const Row& row) {
  const double memory_limit = device_.is_cuda() ? 24e9 : 2e9;
  const Inputs inputs = make_inputs(row.problem, device_, cold_bytes(device_), memory_limit);
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

void Run::add(const std::string& implementation, const Row& row, const Timing& timing) {
  const Result result = make_result(implementation, device_name_, row, timing);
  file_.add(result);
  std::fprintf(stderr, "%s %s: %.2f us (%.2f .. %.2f), %.4g TB/s\n", title_.c_str(), implementation.c_str(),
               result.microseconds, result.microseconds_min, result.microseconds_max, result.terabytes_per_second);
}

bool Run::attempt(const std::string& what, const std::function<void()>& action) {
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

} // namespace single_query::benchmark
