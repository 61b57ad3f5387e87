// Attention over few keys of one query head per key/value head: the kernels of simt_single_step.cuh, by data type, head
// dim and number of keys, and their launch.
#pragma once

#include "work.cuh"

#include <cuda_runtime.h>

namespace single_query {

struct SingleStepKernel {
  const void* function; // null: not for this problem
  int warps;
  int cluster_size;
  bool general;
};

// The kernel for what `args` say of the problem, instead of those with a split plan.
SingleStepKernel select_single_step(const KernelArguments& args, const DeviceTraits& device);

void launch_single_step(const SingleStepKernel& kernel, const KernelArguments& args, cudaStream_t stream);

} // namespace single_query
