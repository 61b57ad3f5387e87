// What the header allows in an argument struct, in plain words and 128-bit arithmetic: apart from the library's own
// checks, to be compared with them.
#pragma once

#include "single_query/attention.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace single_query::test {

struct TensorArgument {
  struct Axis {
    std::int64_t size;
    const char* stride_name;
    std::int64_t stride; // in elements
  };
  const char* name;
  const void* data;
  std::int64_t bytes; // of an element
  std::int64_t run;   // elements side by side
  std::vector<Axis> axes;
  bool written = false;

  bool empty() const {
    return run == 0 || std::any_of(axes.begin(), axes.end(), [](const Axis& axis) { return axis.size == 0; });
  }
  std::uintptr_t start() const { return reinterpret_cast<std::uintptr_t>(data); }
  // Of a legal tensor.
  std::uintptr_t end() const;
  bool few_runs() const;
  // Its bytes [begin, end), run by run, sorted.
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> runs() const;
};

// The arguments that are at fault, each one that a message may rightly name. Unsure: whether tensors overlap was too
// much to find out one run after the other.
struct Faults {
  std::vector<std::string> names;
  bool unsure = false;

  void add(std::initializer_list<const char*> more) { names.insert(names.end(), more.begin(), more.end()); }
  void unless(bool good, std::initializer_list<const char*> more) {
    if (!good) {
      add(more);
    }
  }
};

std::int64_t element_bytes_of(DataType type);

// The tensors that a call reads or writes. The sizes are legal.
std::vector<TensorArgument> tensors_of(const AttentionProblem& problem);
std::vector<TensorArgument> tensors_of(const MergeProblem& problem);

Faults faults_of(const AttentionProblem& problem);
Faults faults_of(const MergeProblem& problem);

} // namespace single_query::test
