// What the tests have the GPU itself do: keep a stream waiting, compare results without the host waiting for them,
// and leave garbage in shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace single_query::test {

// Everything after it on the stream happens that much later. Leaves the rest of the GPU to others.
void keep_waiting(cudaStream_t stream, int milliseconds);

// Leaves NaN of every dtype in all of the GPU's shared memory, where the next kernels find it.
void poison_shared_memory(cudaStream_t stream);

// Adds 1 to `*wrong` unless `result` holds the bytes of `expected`, and leaves `result` full of bytes 0xff (NaN).
// All in device memory; `bytes` is a multiple of 2.
void compare_and_poison(cudaStream_t stream, void* result, const void* expected, std::size_t bytes, unsigned* wrong);

} // namespace single_query::test
