// What any kernel on this GPU has to pay: a launch, and a plain read of its bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace single_query::benchmark {

// A kernel of one warp that does nothing.
void launch_empty(cudaStream_t stream);

struct LaunchShape {
  unsigned blocks;
  unsigned threads; // a block, a multiple of 32
};

// Reads two arrays of `bytes` bytes each, 16 bytes a load, in order, one launch. Both are aligned to 16 bytes; up to 15
// bytes at the end of each are left out. sink: 16 bytes of device memory, practically never written.
void launch_read(const void* first, const void* second, std::size_t bytes, LaunchShape shape, void* sink,
                 cudaStream_t stream);

} // namespace single_query::benchmark
