// What the library asks of the CUDA runtime: facts of the current device, asked once, and launches that report.
#pragma once

#include "single_query/attention.h"
#include "split_plan.h"

namespace single_query {

struct Device {
  int index = 0;
  DeviceTraits traits{};
  int shared_bytes = 0; // that a block may have at most
};

// The calling thread's current device. Refuses devices that no kernel here can run on.
Device current_device();

struct Launch {
  const void* function;
  dim3 grid;
  unsigned threads;
  unsigned shared_bytes;
  int cluster_size;
  cudaStream_t stream;
};

// As much dynamic shared memory as the device grants, for launches of `function`. Throws on failure, as launch() does.
void allow_shared_memory(const void* function, const Device& device);

// Launch `function` with its one argument. Throws on failure; a CUDA error that was pending before stays pending, and
// none that was not.
void launch(const Launch& launch, const void* argument);

} // namespace single_query
