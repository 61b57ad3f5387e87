#include "benchmark_results.h"

#include <cstdio>
#include <filesystem>
#include <map>
#include <sstream>
#include <stdexcept>

namespace single_query::benchmark {
namespace {

constexpr char header[] = "implementation,device,dtype,batch,query_heads,kv_heads,keys,head_dim,mode,microseconds,"
                          "microseconds_min,microseconds_max,terabytes_per_second";
constexpr double allowed_growth = 1.10;

std::string dtype_name(at::ScalarType dtype) {
  return dtype == at::kFloat ? "float32" : dtype == at::kHalf ? "float16" : "bfloat16";
}

std::string number(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// Name and feature: "single_query paged16" -> "single_query", "paged16".
std::pair<std::string, std::string> split(const std::string& implementation) {
  const std::size_t space = implementation.find(' ');
  return space == std::string::npos ? std::pair(implementation, std::string())
                                    : std::pair(implementation.substr(0, space), implementation.substr(space + 1));
}

// What rows of one problem have in common.
std::string problem_of(const Result& result) {
  const std::string feature = split(result.implementation).second;
  std::ostringstream text;
  text << result.device << " " << result.dtype << " " << result.batch << " " << result.query_heads << "/"
       << result.kv_heads << " " << result.keys << "x" << result.head_dim << (feature.empty() ? "" : " ") << feature
       << " " << result.mode;
  return text.str();
}

bool is_ours(const std::string& name) {
  return name.rfind("single_query", 0) == 0;
}

// "problem: ours / peer" -> ratio of the two times
std::map<std::string, double> ratios(const std::vector<Result>& results) {
  std::multimap<std::string, const Result*> peers;
  for (const Result& result : results) {
    const std::string name = split(result.implementation).first;
    if (!is_ours(name) && name != "read" && name != "empty") {
      peers.emplace(problem_of(result), &result);
    }
  }
  std::map<std::string, double> found;
  for (const Result& result : results) {
    const std::string name = split(result.implementation).first;
    if (!is_ours(name)) {
      continue;
    }
    const std::string problem = problem_of(result);
    const auto [first, last] = peers.equal_range(problem);
    for (auto peer = first; peer != last; ++peer) {
      found[problem + ": " + name + " / " + split(peer->second->implementation).first] =
          result.microseconds / peer->second->microseconds;
    }
  }
  return found;
}

Result parse(const std::string& line, const std::string& place) {
  std::vector<std::string> fields;
  std::istringstream stream(line);
  for (std::string field; std::getline(stream, field, ',');) {
    fields.push_back(field);
  }
  try {
    if (fields.size() != 13) {
      throw std::invalid_argument("not 13 fields");
    }
    Result result;
    result.implementation = fields[0];
    result.device = fields[1];
    result.dtype = fields[2];
    result.batch = std::stoll(fields[3]);
    result.query_heads = std::stoll(fields[4]);
    result.kv_heads = std::stoll(fields[5]);
    result.keys = std::stoll(fields[6]);
    result.head_dim = std::stoll(fields[7]);
    result.mode = fields[8];
    result.microseconds = std::stod(fields[9]);
    result.microseconds_min = std::stod(fields[10]);
    result.microseconds_max = std::stod(fields[11]);
    result.terabytes_per_second = std::stod(fields[12]);
    if (!(result.microseconds > 0)) {
      throw std::invalid_argument("a time that is not positive");
    }
    return result;
  } catch (const std::logic_error& error) { // of std::stod too
    throw std::runtime_error(place + ": not a row of results (" + error.what() + "): " + line);
  }
}

} // namespace

Result make_result(const std::string& implementation, const std::string& device, const Row& row, const Timing& timing) {
  const Problem& problem = row.problem;
  const std::string feature = problem.feature();
  Result result;
  result.implementation = feature.empty() ? implementation : implementation + " " + feature;
  result.device = device;
  result.dtype = dtype_name(problem.dtype);
  result.batch = problem.batch;
  result.query_heads = problem.query_heads;
  result.kv_heads = problem.kv_heads;
  result.keys = problem.keys;
  result.head_dim = problem.head_dim;
  result.mode = mode_name(row.mode);
  result.microseconds = timing.median;
  result.microseconds_min = timing.minimum;
  result.microseconds_max = timing.maximum;
  result.terabytes_per_second = problem.bytes() / timing.median * 1e-6; // bytes / us -> TB / s
  return result;
}

ResultFile::ResultFile(const std::string& path) : path_(path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code ignored; // opening the file reports what matters
  if (!folder.empty()) {
    std::filesystem::create_directories(folder, ignored);
  }
  file_.open(path, std::ios::trunc);
  file_ << header << std::endl;
  if (!file_) {
    throw std::runtime_error("--output: cannot write to '" + path + "'");
  }
}

void ResultFile::add(const Result& result) {
  file_ << result.implementation << ',' << result.device << ',' << result.dtype << ',' << result.batch << ','
        << result.query_heads << ',' << result.kv_heads << ',' << result.keys << ',' << result.head_dim << ','
        << result.mode << ',' << number(result.microseconds, 3) << ',' << number(result.microseconds_min, 3) << ','
        << number(result.microseconds_max, 3) << ',' << number(result.terabytes_per_second, 5) << std::endl;
  if (!file_) {
    throw std::runtime_error("--output: writing to '" + path_ + "' failed");
  }
  results_.push_back(result);
}

std::vector<Result> read_results(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) {
    throw std::runtime_error("'" + path + "' cannot be read, or is empty");
  }
  if (line != header) {
    throw std::runtime_error("'" + path + "' does not begin with the columns " + header);
  }
  std::vector<Result> results;
  for (int number = 2; std::getline(file, line); ++number) {
    results.push_back(parse(line, path + ":" + std::to_string(number)));
  }
  return results;
}

Comparison compare(const std::vector<Result>& now, const std::vector<Result>& then) {
  const std::map<std::string, double> before = ratios(then);
  Comparison comparison;
  for (const auto& [name, ratio] : ratios(now)) {
    const auto found = before.find(name);
    if (found == before.end()) {
      continue;
    }
    ++comparison.compared;
    if (ratio > allowed_growth * found->second) {
      comparison.worse.push_back(name + ": " + number(found->second, 3) + " then, " + number(ratio, 3) + " now");
    }
  }
  return comparison;
}

} // namespace single_query::benchmark
