#include "benchmark_problem.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <tuple>

namespace single_query::benchmark {
namespace {

// Keys of the sequences that are short beside a long one or a large capacity.
constexpr std::int64_t short_length = 1024;

struct Heads {
  std::int64_t query;
  std::int64_t kv;
};

Problem dense(std::int64_t batch, Heads heads, std::int64_t keys, std::int64_t head_dim = 128,
              at::ScalarType dtype = at::kBFloat16) {
  Problem problem;
  problem.dtype = dtype;
  problem.batch = batch;
  problem.query_heads = heads.query;
  problem.kv_heads = heads.kv;
  problem.keys = keys;
  problem.head_dim = head_dim;
  return problem;
}

Problem one_head(std::int64_t keys, std::int64_t head_dim, at::ScalarType dtype) {
  return dense(1, {1, 1}, keys, head_dim, dtype);
}

Problem paged(std::int64_t page_size, Problem problem) {
  problem.page_size = page_size;
  problem.lengths = problem.lengths == Lengths::none ? Lengths::full : problem.lengths;
  return problem;
}

Problem with_lengths(Lengths lengths, Problem problem) {
  problem.lengths = lengths;
  return problem;
}

Problem windowed(std::int64_t window, Problem problem) {
  problem.window = window;
  return problem;
}

std::vector<Row> in_mode(Mode mode, const std::vector<Problem>& problems) {
  std::vector<Row> rows;
  rows.reserve(problems.size());
  for (const Problem& problem : problems) {
    rows.push_back({problem, mode, true});
  }
  return rows;
}

std::vector<Row> in_graph_and_eager(const std::vector<Problem>& problems) {
  std::vector<Row> rows;
  for (const Problem& problem : problems) {
    rows.push_back({problem, Mode::graph, true});
    rows.push_back({problem, Mode::eager, true});
  }
  return rows;
}

std::vector<Row> latency_rows() {
  return in_graph_and_eager({dense(1, {32, 8}, 1024), dense(1, {32, 8}, 2048), dense(1, {32, 8}, 8192),
                             dense(1, {64, 8}, 8192), dense(1, {32, 32}, 1024), dense(1, {8, 8}, 1024),
                             dense(4, {32, 8}, 1024), dense(16, {32, 8}, 1024), dense(8, {128, 1}, 8192),
                             one_head(64, 32, at::kHalf), one_head(256, 128, at::kHalf),
                             one_head(1024, 64, at::kHalf)});
}

std::vector<Row> large_rows() {
  return in_mode(Mode::graph, {dense(1, {1, 1}, 1 << 20), dense(1, {8, 8}, 65536), dense(1, {32, 8}, 131072),
                               dense(16, {32, 8}, 4096), dense(64, {32, 8}, 4096), dense(64, {64, 8}, 8192),
                               dense(16, {32, 32}, 4096)});
}

std::vector<Row> float32_rows() {
  std::vector<Row> rows = in_graph_and_eager({one_head(64, 32, at::kFloat), one_head(64, 64, at::kFloat),
                                              one_head(256, 64, at::kFloat), one_head(256, 128, at::kFloat),
                                              one_head(1024, 64, at::kFloat), one_head(1024, 128, at::kFloat)});
  Problem warm = one_head(64, 32, at::kFloat);
  warm.warm = true;
  rows.push_back({warm, Mode::graph, true});
  rows.push_back({one_head(1 << 20, 128, at::kFloat), Mode::graph, true});
  return rows;
}

std::vector<Row> paged_rows() {
  const Problem middle = dense(16, {32, 8}, 4096);
  const Problem long_context = dense(1, {32, 8}, 131072);
  return in_mode(Mode::graph,
                 {paged(16, dense(1, {32, 8}, 1024)), paged(16, dense(1, {32, 8}, 8192)), paged(16, middle),
                  paged(1, middle), paged(64, middle), paged(256, middle), paged(16, dense(64, {32, 8}, 4096)),
                  paged(16, dense(64, {64, 8}, 8192)), paged(64, dense(64, {64, 8}, 8192)),
                  paged(16, dense(16, {32, 32}, 4096)),
                  paged(16, with_lengths(Lengths::one_long, dense(64, {32, 8}, 131072))),
                  paged(16, with_lengths(Lengths::harmonic, dense(64, {32, 8}, 65536))),
                  paged(16, windowed(4096, long_context)), paged(16, windowed(1024, dense(16, {32, 8}, 32768)))});
}

std::vector<Row> feature_rows() {
  const Problem base = dense(16, {32, 8}, 4096);
  Problem softcap = base;
  softcap.softcap = true;
  Problem alibi = base;
  alibi.alibi = true;
  Problem sinks = base;
  sinks.sinks = true;
  Problem boolean_mask = base;
  boolean_mask.mask = Mask::boolean;
  Problem additive_mask = base;
  additive_mask.mask = Mask::additive;
  return in_mode(Mode::graph,
                 {base, with_lengths(Lengths::full, base), softcap, alibi, sinks, boolean_mask, additive_mask,
                  windowed(4096, dense(1, {32, 8}, 131072)), windowed(1024, dense(16, {32, 8}, 32768)),
                  with_lengths(Lengths::one_long, dense(16, {32, 8}, 32768)), dense(1, {32, 8}, 1024),
                  with_lengths(Lengths::nearly_empty, dense(1, {32, 8}, 131072))});
}

std::vector<Row> cpu_rows() {
  std::vector<Problem> problems = {one_head(64, 32, at::kFloat)};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t keys : {1, 64, 1024, 8192, 32768}) {
      problems.push_back(dense(1, {32, 8}, keys, 128, dtype));
    }
    problems.push_back(dense(1, {1, 1}, 65536, 128, dtype));
    problems.push_back(dense(1, {8, 8}, 8192, 128, dtype));
    problems.push_back(dense(16, {32, 8}, 1024, 128, dtype));
  }
  problems.push_back(with_lengths(Lengths::harmonic, dense(16, {32, 8}, 4096)));
  problems.push_back(paged(16, dense(1, {32, 8}, 8192)));
  problems.push_back(windowed(1024, dense(1, {32, 8}, 32768)));
  return in_mode(Mode::eager, problems);
}

struct Group {
  const char* name;
  std::vector<Row> (*rows)();
};

// In the order in which a run goes through them.
const Group groups[] = {
    {"host", [] { return in_mode(Mode::host, {one_head(64, 32, at::kFloat)}); }},
    {"float32", float32_rows},
    {"latency", latency_rows},
    {"large", large_rows},
    {"paged", paged_rows},
    {"features", feature_rows},
    {"cpu", cpu_rows},
};

std::string lengths_word(Lengths lengths) {
  switch (lengths) {
  case Lengths::none:
    return "";
  case Lengths::full:
    return "lengths";
  case Lengths::nearly_empty:
    return "lengths_" + std::to_string(short_length);
  case Lengths::one_long:
    return "lengths_one_long";
  case Lengths::harmonic:
    return "lengths_harmonic";
  }
  throw std::logic_error("lengths_word: not a Lengths");
}

} // namespace

std::int64_t Problem::length(std::int64_t row) const {
  switch (lengths) {
  case Lengths::none:
  case Lengths::full:
    return keys;
  case Lengths::nearly_empty:
    return std::min(keys, short_length);
  case Lengths::one_long:
    return row == 0 ? keys : std::min(keys, short_length);
  case Lengths::harmonic:
    return keys / (row + 1);
  }
  throw std::logic_error("Problem::length: not a Lengths");
}

std::int64_t Problem::attended(std::int64_t row) const {
  return window > 0 ? std::min(window, length(row)) : length(row);
}

double Problem::bytes() const {
  std::int64_t attended_keys = 0;
  for (std::int64_t row = 0; row < batch; ++row) {
    attended_keys += attended(row);
  }
  return 2.0 * static_cast<double>(attended_keys * kv_heads * head_dim) * static_cast<double>(c10::elementSize(dtype));
}

std::string Problem::feature() const {
  std::string words;
  const auto add = [&](bool present, const std::string& word) {
    if (present) {
      words += (words.empty() ? "" : " ") + word;
    }
  };
  // A paged cache always has lengths: only unusual ones are worth a word.
  const bool usual_lengths = page_size > 0 && lengths == Lengths::full;
  add(page_size > 0, "paged" + std::to_string(page_size));
  add(lengths != Lengths::none && !usual_lengths, lengths_word(lengths));
  add(window > 0, "window" + std::to_string(window));
  add(softcap, "softcap");
  add(alibi, "alibi");
  add(sinks, "sinks");
  add(mask == Mask::boolean, "mask_boolean");
  add(mask == Mask::additive, "mask_additive");
  add(warm, "warm");
  return words;
}

std::string Problem::name() const {
  const std::string words = feature();
  return std::string(dtype == at::kFloat  ? "float32"
                     : dtype == at::kHalf ? "float16"
                                          : "bfloat16") +
         " " + std::to_string(batch) + " " + std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " " +
         std::to_string(keys) + "x" + std::to_string(head_dim) + (words.empty() ? "" : " " + words);
}

const char* mode_name(Mode mode) {
  switch (mode) {
  case Mode::graph:
    return "graph";
  case Mode::eager:
    return "eager";
  case Mode::host:
    return "host";
  }
  throw std::logic_error("mode_name: not a Mode");
}

std::vector<Row> rows_of_group(const std::string& group) {
  for (const Group& candidate : groups) {
    if (group == candidate.name) {
      return candidate.rows();
    }
  }
  std::string allowed;
  for (const std::string& name : group_names()) {
    allowed += name + ", ";
  }
  throw std::invalid_argument("--rows: there is no group '" + group + "'; allowed are " + allowed + "all");
}

std::vector<std::string> group_names() {
  std::vector<std::string> names;
  for (const Group& group : groups) {
    names.emplace_back(group.name);
  }
  return names;
}

std::vector<Row> sweep_rows() {
  std::set<std::string> seen; // the crossings meet in some points
  std::vector<Row> rows;
  const auto add = [&](const Problem& problem, bool peers) {
    if (seen.insert(problem.name()).second) {
      rows.push_back({problem, Mode::graph, peers});
    }
  };
  // Keys: every power of two and its neighbours, for the usual grouped shape and for one head of other dtypes. The
  // peers, which take most of the time, at every power of four.
  for (std::int64_t power = 1; power <= 1 << 20; power *= 2) {
    for (const std::int64_t keys : {power, power - 1, power + 1}) {
      if (keys >= 1) {
        const bool peers = keys == power && (power & 0x155555) != 0;
        add(dense(1, {32, 8}, keys), peers);
        add(one_head(keys, 128, at::kFloat), peers);
        add(one_head(keys, 128, at::kHalf), false);
      }
    }
  }
  // head_dim, one of them odd.
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const std::int64_t head_dim : {32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 67}) {
      for (const std::int64_t keys : {1024, 8192, 65536}) {
        add(dense(1, {32, 8}, keys, head_dim, dtype), false);
      }
    }
  }
  // Query heads per KV head.
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128}) {
      for (const std::int64_t keys : {1024, 8192, 65536}) {
        add(dense(1, {8 * group, 8}, keys, 128, dtype), false);
      }
    }
  }
  // Batch; 20 sequences are an awkward number of rows for the SMs.
  for (const std::int64_t batch : {1, 4, 16, 20, 64}) {
    for (const Heads heads : {Heads{8, 8}, Heads{32, 8}, Heads{64, 8}}) {
      for (const std::int64_t keys : {1023, 1024, 1025, 4096, 8192}) {
        add(dense(batch, heads, keys), false);
      }
    }
  }
  return rows;
}

} // namespace single_query::benchmark
