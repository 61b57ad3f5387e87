// What the benchmark measures: attention problems, grouped into the rows of the README's tables, and the sweep.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace single_query::benchmark {

// Which keys of its row's capacity each sequence of a batch has.
enum class Lengths {
  none,         // no lengths are given: all of them
  full,         // all of them, but only the device knows
  nearly_empty, // the first 1,024 of a large capacity
  one_long,     // sequence 0 has all of them, every other one 1,024
  harmonic      // sequence i has 1 / (i + 1) of them
};

enum class Mask { none, boolean, additive };

struct Problem {
  at::ScalarType dtype = at::kBFloat16;
  std::int64_t batch = 1;
  std::int64_t query_heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t keys = 1; // capacity of the longest sequence
  std::int64_t head_dim = 128;

  Lengths lengths = Lengths::none;
  std::int64_t page_size = 0; // 0: a contiguous cache
  std::int64_t window = 0;    // 0: off
  Mask mask = Mask::none;
  bool softcap = false;
  bool alibi = false;
  bool sinks = false;
  bool warm = false; // every call reads the same cache, which stays in the L2 of the GPU

  std::int64_t group() const { return query_heads / kv_heads; }
  // Keys that sequence `row` has, and how many of them its window lets through.
  std::int64_t length(std::int64_t row) const;
  std::int64_t attended(std::int64_t row) const;
  // Every sequence has the same number of keys and the host knows it.
  bool uniform() const { return lengths == Lengths::none || lengths == Lengths::full; }
  // Bytes of all keys and values that are attended to, counted once.
  double bytes() const;
  // Words for what is not plain: "paged16 lengths_one_long"; empty for a plain problem.
  std::string feature() const;
  // "bfloat16 1 32/8 8192x128 paged16"
  std::string name() const;
};

enum class Mode {
  graph, // a CUDA graph of many calls, cold caches
  eager, // calls one after the other, nothing captured
  host   // time until a call returns to the calling thread
};
const char* mode_name(Mode mode);

struct Row {
  Problem problem;
  Mode mode;
  bool peers; // and a plain read of the same bytes
};

// The rows of a group: "latency", "large", "float32", "paged", "features", "host" or "cpu".
// Throws std::invalid_argument, naming the group and the groups there are.
std::vector<Row> rows_of_group(const std::string& group);
std::vector<std::string> group_names();

// Points in which a cliff would show: keys, head_dim, query heads per KV head and batch, each varied through a few
// crossings of the others, since the full product would take days. Peers only where keys are a power of two.
std::vector<Row> sweep_rows();

} // namespace single_query::benchmark
