#include "device.h"

#include "device_kernels.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace single_query::test {

constexpr std::align_val_t host_alignment{64};

Memory::Memory(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  if (device == Device::cpu) {
    data_ = static_cast<std::byte*>(::operator new(bytes, host_alignment));
  } else {
    require_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), bytes));
  }
}

Memory::~Memory() {
  if (data_ == nullptr) {
    return;
  }
  if (device_ == Device::cpu) {
    ::operator delete(data_, host_alignment);
  } else {
    cudaFree(data_);
  }
}

void Memory::swap(Memory& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

void Memory::upload(const void* from, std::size_t bytes, std::size_t at) {
  if (bytes == 0) {
    return;
  }
  if (device_ == Device::cpu) {
    std::memcpy(data_ + at, from, bytes);
  } else {
    require_cuda(cudaMemcpy(data_ + at, from, bytes, cudaMemcpyHostToDevice));
    require_cuda(cudaStreamSynchronize(nullptr)); // from pageable memory the copy may still be on its way
  }
}

void Memory::download(void* to, std::size_t bytes, std::size_t at) const {
  if (bytes == 0) {
    return;
  }
  if (device_ == Device::cpu) {
    std::memcpy(to, data_ + at, bytes);
  } else {
    require_cuda(cudaMemcpy(to, data_ + at, bytes, cudaMemcpyDeviceToHost));
  }
}

void Stream::delay(int milliseconds) const {
  keep_waiting(stream_, milliseconds);
}

Graph::Graph(const Stream& stream, const std::function<void()>& work) {
  require_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream.get(), &graph);
    cudaGraphDestroy(graph);
    throw;
  }
  require_cuda(cudaStreamEndCapture(stream.get(), &graph));
  const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
  cudaGraphDestroy(graph);
  require_cuda(error);
}

void* CudaWorkspace::at_least(std::size_t bytes) {
  constexpr std::size_t behind = 4096;
  if (memory_.size() < bytes + behind) {
    memory_ = Memory();
    memory_ = Memory(Device::cuda, 2 * bytes + behind);
    require_cuda(cudaMemset(memory_.data(), 0, memory_.size()));
    require_cuda(cudaDeviceSynchronize());
  }
  return memory_.data();
}

ParallelFor threads(int count) {
  return [count](std::int64_t tasks, const std::function<void(std::int64_t, std::int64_t)>& body) {
    std::vector<std::thread> workers;
    std::int64_t begin = 0;
    for (int i = 0; i < count; ++i) {
      const std::int64_t end = i + 1 == count ? tasks : begin + (tasks - begin) / 2; // halves: uneven on purpose
      if (end > begin) {
        workers.emplace_back(body, begin, end);
      }
      begin = end;
    }
    for (std::thread& worker : workers) {
      worker.join();
    }
  };
}

ParallelFor one_by_one() {
  return [](std::int64_t tasks, const std::function<void(std::int64_t, std::int64_t)>& body) {
    for (std::int64_t task = tasks; task-- > 0;) {
      body(task, task + 1);
    }
  };
}

} // namespace single_query::test
