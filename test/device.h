// The two places a test runs on, and the CUDA resources it needs there, as values that clean up after themselves.
#pragma once

#include "single_query/attention.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>

namespace single_query::test {

enum class Device { cpu, cuda };

// A CUDA call of the tests' own that failed.
inline void require_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("test's own CUDA call: ") + cudaGetErrorName(error));
  }
}

// Memory on a device, of exactly `bytes`.
class Memory {
public:
  Memory() = default;
  Memory(Device device, std::size_t bytes);
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  void upload(const void* from, std::size_t bytes, std::size_t at = 0);
  void download(void* to, std::size_t bytes, std::size_t at = 0) const;

private:
  void swap(Memory& other) noexcept;

  Device device_ = Device::cpu;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A stream that does not wait for the default one, so that work on the wrong stream shows.
class Stream {
public:
  Stream() { require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }

  cudaStream_t get() const { return stream_; }
  void wait() const { require_cuda(cudaStreamSynchronize(stream_)); }
  // Everything after it on this stream happens that much later.
  void delay(int milliseconds) const;

private:
  cudaStream_t stream_ = nullptr;
};

// A captured graph. `work` launches on the stream that is captured.
class Graph {
public:
  Graph(const Stream& stream, const std::function<void()>& work);
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(executable_); }

  void replay(const Stream& stream) const { require_cuda(cudaGraphLaunch(executable_, stream.get())); }

private:
  cudaGraphExec_t executable_ = nullptr;
};

// One workspace for problem after problem, filled with zeros once, as the header has it.
class CudaWorkspace {
public:
  // At least `bytes` of it, and what lies behind them stays as it is from call to call.
  void* at_least(std::size_t bytes);
  const Memory& memory() const { return memory_; }

private:
  Memory memory_;
};

// Ways to share work out. A result depends on none of them.
ParallelFor threads(int count); // uneven ranges, one thread each
ParallelFor one_by_one();       // task by task, the last one first

} // namespace single_query::test
