// Scratch memory for the CUDA calls of the LibTorch layer.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstddef>

namespace single_query {

struct Workspace {
  void* data;
  std::size_t bytes;
};

// At least `bytes` of device memory for a kernel that is about to be launched on `stream`, in the state that the raw
// interface asks for: zeroed when it was allocated, and since then used by nothing but its kernels, one after the
// other. Costs a search in a short list; allocates where this thread has none for this stream yet, or a smaller one.
// The stream's device has to be current. Throws c10::Error where memory is out or CUDA fails.
Workspace cuda_workspace(c10::cuda::CUDAStream stream, std::size_t bytes);

} // namespace single_query
