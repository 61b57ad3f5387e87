// Who may share a workspace: calls that CUDA runs one after the other, and nobody else. Hence one for each
//
// - host thread: so that no lock is needed;
// - stream: named by cudaStreamGetId, because the handle of a destroyed stream is given to a new one;
// - capture of a CUDA graph. The graph may be replayed on any stream, beside eager calls and other graphs, so its
//   workspace can be none of theirs: it is allocated during the capture, zeroed by a memset that becomes a node of the
//   graph, and owned by the graph, which outlives the capture, this thread and every tensor.
//
// Freeing is safe without synchronisation. Eager: LibTorch's allocator hands memory of a stream out again in the order
// of that stream. Captured: a graph gives up what it owns when it is destroyed and its last replay has ended.
#include "torch_workspace.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace single_query {
namespace {

struct Owner {
  c10::DeviceIndex device = 0;
  unsigned long long stream = 0;
  unsigned long long capture = 0; // 0: eager
  bool operator==(const Owner&) const = default;
};

struct Entry {
  Owner owner;
  Workspace workspace;
  c10::DataPtr memory;        // empty where a graph owns it
  std::uint64_t last_use = 0; // number of the call
};

constexpr std::size_t most_entries = 64; // more streams than this in turn: the one unused for longest has to go
constexpr std::size_t least_bytes = std::size_t{1} << 16;

// What destroyed graphs gave up. Their callback may call nothing of CUDA, so a later call of the library frees it.
// Never destroyed: graphs may be destroyed after static objects are.
struct Retired {
  std::mutex mutex;
  std::vector<c10::DataPtr> memory;
  std::atomic<bool> any = false;
};

Retired& retired() {
  static auto* const instance = new Retired;
  return *instance;
}

void retire(void* graph_memory) {
  const std::unique_ptr<c10::DataPtr> memory(static_cast<c10::DataPtr*>(graph_memory));
  const std::lock_guard lock(retired().mutex);
  retired().memory.push_back(std::move(*memory));
  retired().any = true;
}

void free_retired() {
  std::vector<c10::DataPtr> memory;
  const std::lock_guard lock(retired().mutex);
  memory.swap(retired().memory);
  retired().any = false;
}

// A stream of `device` that no work ever goes to. LibTorch's allocator keeps the memory of each stream apart, so memory
// of this one was last used by a graph that is gone, and never by something that may still be running.
c10::cuda::CUDAStream graph_memory_stream(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::vector<cudaStream_t> streams;
  const std::lock_guard lock(mutex);
  const std::size_t index = static_cast<unsigned char>(device);
  streams.resize(std::max(streams.size(), index + 1));
  if (streams[index] == nullptr) {
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&streams[index], cudaStreamNonBlocking));
  }
  return c10::cuda::getStreamFromExternal(streams[index], device);
}

// On a thread of its own, because LibTorch can send the allocations of a thread or of a capture to a private pool
// (torch.compile does), where memory that outlives the region is refused as a leak.
c10::DataPtr allocate_outside_pools(c10::cuda::CUDAStream stream, bool for_graph, std::size_t bytes) {
  const auto allocate = [=] {
    const c10::cuda::CUDAGuard device(stream.device());
    // Another thread's capture in global mode forbids this one to allocate; nothing here touches that capture.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    const c10::cuda::CUDAStreamGuard owner(for_graph ? graph_memory_stream(stream.device_index()) : stream);
    return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  };
  return std::async(std::launch::async, allocate).get();
}

// Hands the memory to the graph that is being captured.
void give_to_graph(cudaGraph_t graph, c10::DataPtr memory) {
  auto owned = std::make_unique<c10::DataPtr>(std::move(memory));
  cudaUserObject_t object = nullptr;
  C10_CUDA_CHECK(cudaUserObjectCreate(&object, owned.get(), retire, 1, cudaUserObjectNoDestructorSync));
  static_cast<void>(owned.release()); // the object's from here on
  const cudaError_t error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) {
    cudaUserObjectRelease(object);
  }
  C10_CUDA_CHECK(error);
}

Entry make_entry(c10::cuda::CUDAStream stream, std::size_t bytes, const Owner& owner, cudaGraph_t graph) {
  const std::size_t allocated = std::bit_ceil(std::max(bytes, least_bytes));
  const bool captured = owner.capture != 0;
  c10::DataPtr memory = allocate_outside_pools(stream, captured, allocated);
  Entry entry{owner, {memory.get(), allocated}, {}, 0};
  if (captured) {
    give_to_graph(graph, std::move(memory));
  } else {
    entry.memory = std::move(memory);
  }
  C10_CUDA_CHECK(cudaMemsetAsync(entry.workspace.data, 0, allocated, stream));
  return entry;
}

} // namespace

Workspace cuda_workspace(c10::cuda::CUDAStream stream, std::size_t bytes) {
  Owner owner{stream.device_index()};
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph));
  TORCH_CHECK(status != cudaStreamCaptureStatusInvalidated, cudaGetErrorName(cudaErrorStreamCaptureInvalidated),
              ": the current stream's CUDA graph capture was invalidated by an earlier error");
  // A capturing stream may not be asked for its id, but is not destroyed during the capture either.
  if (status == cudaStreamCaptureStatusActive) {
    owner.capture = capture;
    owner.stream = reinterpret_cast<std::uintptr_t>(stream.stream());
  } else {
    C10_CUDA_CHECK(cudaStreamGetId(stream, &owner.stream));
    if (retired().any.load(std::memory_order_relaxed)) {
      free_retired();
    }
  }

  thread_local std::vector<Entry> entries;
  thread_local std::uint64_t calls = 0;
  ++calls;
  for (Entry& entry : entries) {
    if (entry.owner == owner && entry.workspace.bytes >= bytes) {
      entry.last_use = calls;
      return entry.workspace;
    }
  }
  // A capture that this call does not belong to has ended, or starts anew with a workspace of its own. A workspace that
  // is too small goes back before the larger one is allocated.
  std::erase_if(entries, [&](const Entry& entry) {
    return entry.owner == owner || (entry.owner.capture != 0 && entry.owner.capture != owner.capture);
  });
  if (entries.size() == most_entries) {
    const auto used_earlier = [](const Entry& a, const Entry& b) { return a.last_use < b.last_use; };
    entries.erase(std::min_element(entries.begin(), entries.end(), used_earlier));
  }
  entries.push_back(make_entry(stream, bytes, owner, graph));
  entries.back().last_use = calls;
  return entries.back().workspace;
}

} // namespace single_query
