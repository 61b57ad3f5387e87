// Measured rows as CSV, and the comparison of two such files.
#pragma once

#include "benchmark_problem.h"
#include "benchmark_timing.h"

#include <fstream>
#include <string>
#include <vector>

namespace single_query::benchmark {

// A line of the CSV. `implementation` is a name and, after a space, what the problem has beyond query, key and value:
// "single_query paged16". The rows "read" (the best plain read of the same bytes) and "empty" (an empty kernel) are no
// attention. Times are microseconds per call; terabytes per second count each attended key and value once.
struct Result {
  std::string implementation;
  std::string device;
  std::string dtype;
  std::int64_t batch;
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t keys;
  std::int64_t head_dim;
  std::string mode;
  double microseconds;
  double microseconds_min;
  double microseconds_max;
  double terabytes_per_second;
};

Result make_result(const std::string& implementation, const std::string& device, const Row& row, const Timing& timing);

// Writes each row at once, so that a run that is ended early leaves what it measured.
class ResultFile {
public:
  // Creates the file and its folder, or throws std::runtime_error naming the path.
  explicit ResultFile(const std::string& path);
  void add(const Result& result);
  const std::string& path() const { return path_; }
  const std::vector<Result>& results() const { return results_; }

private:
  std::string path_;
  std::ofstream file_;
  std::vector<Result> results_;
};

// Throws std::runtime_error, naming path and line, for anything that ResultFile does not write.
std::vector<Result> read_results(const std::string& path);

// Ratios of this library's time to that of each LibTorch peer in the same row, those of `now` against those of `then`.
struct Comparison {
  int compared = 0;               // ratios that both files have
  std::vector<std::string> worse; // names of those that got more than 10 % worse, with both ratios
};
Comparison compare(const std::vector<Result>& now, const std::vector<Result>& then);

} // namespace single_query::benchmark
