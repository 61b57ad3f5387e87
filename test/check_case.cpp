#include "check_case.h"

#include "device_kernels.h"
#include "reference_device.h"

#include <cstring>
#include <exception>
#include <stdexcept>

namespace single_query::test {
namespace {

Fill next(Fill fill) {
  return static_cast<Fill>((static_cast<int>(fill) + 1) % 3);
}

bool same_bits(const Result& a, const Result& b) {
  return a.output == b.output &&
         (a.lse.empty() || b.lse.empty() ||
          (a.lse.size() == b.lse.size() && std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0));
}

// What a call must not rely on: what is in the results, and on the GPU in shared memory.
void poison(Placement& placement, Fill fill, Device device) {
  placement.poison_results(fill);
  if (device == Device::cuda) {
    poison_shared_memory(shared_stream().get());
  }
}

// Calls again over results poisoned otherwise, and expects what the first call gave.
void expect_again(Placement& placement, Device device, Fill fill, const Result& first, const char* how,
                  const std::function<void()>& again) {
  poison(placement, fill, device);
  again();
  if (!same_bits(first, placement.results())) {
    throw std::runtime_error(std::string("other bits ") + how);
  }
}

Comparison checked(const AttentionData& data, Device device) {
  const AttentionCase& c = data.attention_case();
  const Fill second = next(c.fill);
  const Fill third = next(second);
  Placement placement(data, device);
  poison(placement, c.fill, device);
  call(placement.problem, device, {c.fill});
  const Result first = placement.results();
  // On the GPU, unless the keys that are allocated are far more than there can be in memory.
  const bool on_gpu = device == Device::cuda && c.capacity() < (1 << 24);
  const Reference expected = on_gpu ? reference_on_device(placement.problem) : reference(data.host_problem());
  Comparison comparison = compare(first, expected, c.dtype, weights_on(device, c.dtype));
  if (!comparison.passed()) {
    return comparison;
  }

  float* const lse = placement.problem.lse;
  placement.problem.lse = nullptr;
  expect_again(placement, device, second, first, "without lse, over other poison", [&] {
    call(placement.problem, device, {second, one_by_one()});
  });
  placement.problem.lse = lse;
  if (device == Device::cpu) {
    expect_again(placement, device, third, first, "on several threads", [&] {
      call(placement.problem, device, {third, threads(3)});
    });
  } else {
    const Graph graph(shared_stream(), [&] { launch(placement.problem, shared_stream(), shared_workspace()); });
    for (int replay = 0; replay < 2; ++replay) {
      expect_again(placement, device, third, first, "replayed from a graph", [&] {
        graph.replay(shared_stream());
        shared_stream().wait();
      });
    }
  }
  return comparison;
}

} // namespace

Comparison check(const AttentionData& data, Device device) {
  try {
    return checked(data, device);
  } catch (const std::exception& error) {
    Comparison comparison;
    comparison.failure = error.what();
    return comparison;
  }
}

Comparison check(const AttentionCase& attention_case, Device device) {
  return check(AttentionData(attention_case), device);
}

} // namespace single_query::test
