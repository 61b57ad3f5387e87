#include "check_arguments.h"

#include "random_arguments.h"

#include <cstring>
#include <exception>
#include <new>
#include <optional>

namespace single_query::test {
namespace {

// Host memory of exactly so many bytes, at any alignment up to 64.
class Workspace {
public:
  explicit Workspace(std::size_t bytes, std::size_t shift = 0)
      : memory_(static_cast<std::byte*>(::operator new(bytes + shift, std::align_val_t(64)))), shift_(shift) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { ::operator delete(memory_, std::align_val_t(64)); }
  void* data() const { return memory_ + shift_; }

private:
  std::byte* memory_;
  std::size_t shift_;
};

// The message of a refusal; nothing where the call came back.
template <class Call>
std::optional<std::string> refusal_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind() == Error::Kind::invalid_argument ? error.what() : std::string("CUDA: ") + error.what();
  }
  return std::nullopt;
}

// "<function>: <one of names> is ...: it..."
bool names_one_of(const std::string& message, const std::string& function, const std::vector<std::string>& names) {
  return message.find(": it") != std::string::npos &&
         std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return message.rfind(function + ": " + name + " is ", 0) == 0; });
}

double work_of(const AttentionProblem& p) {
  return static_cast<double>(p.batch) * static_cast<double>(p.query_heads) *
         (static_cast<double>(p.max_pages) * static_cast<double>(p.page_size) + 1) * static_cast<double>(p.head_dim);
}
double work_of(const MergeProblem& p) {
  return static_cast<double>(p.batch) * static_cast<double>(p.heads) * (static_cast<double>(p.parts) + 1) *
         static_cast<double>(p.head_dim);
}

// A legal call over the arena: it has to come back, having written its outputs alone.
template <class Call>
std::string check_written(Arena& arena, const std::vector<TensorArgument>& tensors, const Call& call) {
  std::vector<std::byte> expected(arena.begin(), arena.begin() + Arena::bytes);
  call();
  for (const TensorArgument& tensor : tensors) {
    if (!tensor.written || tensor.empty()) {
      continue;
    }
    for (const auto& [begin, end] : tensor.runs()) {
      std::memcpy(expected.data() + (begin - arena.start()), reinterpret_cast<const void*>(begin), end - begin);
    }
  }
  const bool same = std::memcmp(expected.data(), arena.begin(), Arena::bytes) == 0;
  return same ? "" : "memory was written that is no output";
}

std::string expect_refusals(const std::string& function, const std::vector<std::string>& names,
                            const std::vector<std::optional<std::string>>& refusals) {
  for (const auto& refusal : refusals) {
    if (!refusal) {
      return "a call was not refused for " + names.front();
    }
    if (!names_one_of(*refusal, function, names)) {
      return "refused for another reason than " + names.front() + ": " + *refusal;
    }
  }
  return "";
}

std::string check_workspace(Random& random, const AttentionProblem& p, const std::vector<TensorArgument>& tensors,
                            std::size_t bytes) {
  const auto refused = [&](void* workspace, std::size_t given, const std::vector<std::string>& names) {
    return expect_refusals("attention", names, {refusal_of([&] { attention_on_host(p, workspace, given); })});
  };
  switch (random.integer(0, 4)) {
  case 0:
    return refused(Workspace(bytes).data(), bytes - 1, {"workspace_bytes"});
  case 1:
    return refused(nullptr, bytes, {"workspace"});
  case 2:
    return refused(Workspace(bytes, 32).data(), bytes, {"workspace"});
  case 3: { // on top of a tensor
    const TensorArgument& tensor = tensors[random.bits() % tensors.size()];
    void* const over = reinterpret_cast<void*>((tensor.start() + 63) / 64 * 64);
    const TensorArgument workspace = {"workspace", over, 1, static_cast<std::int64_t>(bytes), {}, true};
    const bool disjoint = std::none_of(tensors.begin(), tensors.end(), [&](const TensorArgument& other) {
      const auto runs = other.empty() ? decltype(other.runs()){} : other.runs();
      return std::any_of(runs.begin(), runs.end(), [&](const auto& run) {
        return run.first < workspace.end() && workspace.start() < run.second;
      });
    });
    return disjoint ? "" : refused(over, bytes, {"workspace"});
  }
  default:
    return "";
  }
}

std::string check_attention(Random& random, Arena& arena, ArgumentCounts& counts) {
  AttentionProblem p = good_attention(random, arena);
  for (std::int64_t spoils = random.one_of({0, 0, 1, 1, 1, 2, 3}); spoils > 0; --spoils) {
    spoil(random, arena, p);
  }
  const Faults faults = faults_of(p);
  std::size_t bytes = 0;
  const auto size_refusal = refusal_of([&] { bytes = attention_on_host_workspace_bytes(p); });
  if (!faults.names.empty()) {
    ++counts.refused;
    Workspace workspace(4096);
    std::string fault;
    const std::string stray = check_written(arena, {}, [&] {
      fault = expect_refusals("attention", faults.names,
                              {size_refusal, refusal_of([&] { attention_on_host(p, workspace.data(), 4096); }),
                               refusal_of([&] { attention_workspace_bytes(p); }),
                               refusal_of([&] { attention(p, workspace.data(), 4096, nullptr); })});
    });
    return fault + stray;
  }
  if (size_refusal && !faults.unsure && !names_one_of(*size_refusal, "attention", {"split_size"})) {
    return "a legal struct was refused: " + *size_refusal;
  }
  const std::vector<TensorArgument> tensors =
      p.batch == 0 || p.query_heads == 0 ? std::vector<TensorArgument>() : tensors_of(p);
  const bool ours =
      std::all_of(tensors.begin(), tensors.end(), [&](const TensorArgument& t) { return arena.holds(t); });
  if (size_refusal || faults.unsure || !ours || work_of(p) > 1e5 || bytes > (1 << 20)) {
    ++counts.accepted_only;
    return "";
  }
  ++counts.computed;
  Workspace workspace(bytes);
  std::string fault = tensors.empty() || bytes == 0 ? "" : check_workspace(random, p, tensors, bytes);
  return !fault.empty() ? fault : check_written(arena, tensors, [&] { attention_on_host(p, workspace.data(), bytes); });
}

std::string check_merge(Random& random, Arena& arena, ArgumentCounts& counts) {
  MergeProblem p = good_merge(random, arena);
  for (std::int64_t spoils = random.one_of({0, 0, 1, 1, 1, 2, 3}); spoils > 0; --spoils) {
    spoil(random, arena, p);
  }
  const Faults faults = faults_of(p);
  if (!faults.names.empty()) {
    ++counts.refused;
    std::string fault;
    const std::string stray = check_written(arena, {}, [&] {
      fault = expect_refusals("merge", faults.names,
                              {refusal_of([&] { merge_on_host(p); }), refusal_of([&] { merge(p, nullptr); })});
    });
    return fault + stray;
  }
  const std::vector<TensorArgument> tensors = tensors_of(p);
  const bool ours =
      std::all_of(tensors.begin(), tensors.end(), [&](const TensorArgument& t) { return arena.holds(t); });
  if (faults.unsure || !ours || work_of(p) > 1e5) {
    ++counts.accepted_only;
    return "";
  }
  ++counts.computed;
  return check_written(arena, tensors, [&] { merge_on_host(p); });
}

} // namespace

std::string check_random_arguments(std::uint64_t seed, ArgumentCounts& counts) {
  Random random(seed);
  Arena arena(random);
  try {
    return seed % 3 == 0 ? check_merge(random, arena, counts) : check_attention(random, arena, counts);
  } catch (const std::exception& error) {
    return std::string("an exception that was not awaited: ") + error.what();
  }
}

} // namespace single_query::test
