// Random argument structs over host memory: good ones, and ways to spoil them.
#pragma once

#include "legal_arguments.h"
#include "random.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace single_query::test {

// The memory that good tensors lie in, side by side; AddressSanitizer watches its ends.
class Arena {
public:
  static constexpr std::size_t bytes = 16384;

  explicit Arena(Random& random) : words_(bytes / 8) {
    std::generate(words_.begin(), words_.end(), [&] { return random.bits(); });
  }

  std::byte* begin() { return reinterpret_cast<std::byte*>(words_.data()); }
  bool holds(const TensorArgument& tensor) {
    return tensor.empty() ||
           (tensor.start() >= start() && tensor.end() <= start() + bytes && tensor.end() > tensor.start());
  }
  std::uintptr_t start() { return reinterpret_cast<std::uintptr_t>(begin()); }

  // The next part that no one has; the first once more when they run out.
  void* take(Random& random, std::int64_t size);

private:
  std::vector<std::uint64_t> words_;
  std::int64_t used_ = 0;
};

AttentionProblem good_attention(Random& random, Arena& arena);
MergeProblem good_merge(Random& random, Arena& arena);

// Changes one field, mostly to what is not allowed.
void spoil(Random& random, Arena& arena, AttentionProblem& problem);
void spoil(Random& random, Arena& arena, MergeProblem& problem);

} // namespace single_query::test
