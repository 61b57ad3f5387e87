// How long a call takes: in a CUDA graph, one after the other, or until it returns.
#pragma once

#include "benchmark_implementations.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace single_query::benchmark {

// Microseconds per call over the repetitions of one measurement.
struct Timing {
  double median;
  double minimum;
  double maximum;
};

// The functions for CUDA run on the current stream, which must not be the default stream.

// A graph of `calls` calls that walk through the caches, replayed 25 times (5 times where 25 would take over 3
// seconds). Before each replay, untimed, other memory of several times the size of the L2 is read, so that every call's
// reads are cold even where all caches together are small; `flush` false leaves that out.
Timing time_in_graph(const Call& call, std::int64_t caches, std::int64_t calls, bool flush);

// 8 or more, up to 64 for small problems, so that the start of a graph counts for little; and once through all caches.
std::int64_t calls_in_graph(double bytes_per_call, std::int64_t caches);

// Calls in a row, 25 times, with the time until the last one has ended.
Timing time_eager(const Call& call, std::int64_t caches);

// 100,000 calls, 500 at a time, with the time until the last one has returned; between them the GPU catches up.
Timing time_on_host(const Call& call);

// Several implementations in turn, so that what else the machine does befalls them alike. For the CPU.
std::vector<Timing> time_interleaved(const std::vector<Implementation>& implementations, std::int64_t caches);

// 2.5 times the size of the device's last cache, and no less than 150 MB: reading so much leaves nothing of what came
// before.
double cold_bytes(at::Device device);

// Times of a plain read of each cache's keys and values, the best of several launch shapes, and of an empty kernel.
Timing time_read(const std::vector<at::Tensor>& key, const std::vector<at::Tensor>& value, std::int64_t calls);
Timing time_empty();

} // namespace single_query::benchmark
