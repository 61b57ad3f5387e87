#include "placement.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace single_query::test {

Placement::Placement(const AttentionData& data, Device device) : data_(&data), device_(device) {
  PerTensor<std::byte*> starts;
  for (std::size_t i = 0; i < tensor_count; ++i) {
    expected_[i] = data.buffer(static_cast<Tensor>(i));
    memory_[i] = Memory(device, expected_[i].bytes().size());
    memory_[i].upload(expected_[i].bytes().data(), expected_[i].bytes().size());
    starts[i] = memory_[i].data();
  }
  problem = data.problem(starts);
}

void Placement::upload(Tensor tensor) {
  const auto i = static_cast<std::size_t>(tensor);
  expected_[i] = data_->buffer(tensor);
  memory_[i].upload(expected_[i].bytes().data(), expected_[i].bytes().size());
}

void Placement::poison_results(Fill fill) {
  for (const Tensor tensor : {Tensor::output, Tensor::lse}) {
    const auto i = static_cast<std::size_t>(tensor);
    expected_[i].refill(fill);
    memory_[i].upload(expected_[i].bytes().data(), expected_[i].bytes().size());
  }
}

Result Placement::results() const {
  const AttentionCase& c = data_->attention_case();
  Result result;
  result.dtype = c.dtype;
  result.rows = c.batch * c.query_heads;
  result.head_dim = c.head_dim;
  const auto row_bytes = static_cast<std::size_t>(c.head_dim * format_of(c.dtype).bytes);
  result.output.resize(static_cast<std::size_t>(result.rows) * row_bytes);
  result.lse.resize(problem.lse != nullptr ? static_cast<std::size_t>(result.rows) : 0);
  for (std::size_t i = 0; i < tensor_count; ++i) {
    const Tensor tensor = static_cast<Tensor>(i);
    std::vector<std::byte> now(expected_[i].bytes().size());
    memory_[i].download(now.data(), now.size());
    GuardedBuffer allowed = expected_[i];
    const auto take = [&](std::byte* to, std::int64_t element, std::size_t bytes) {
      const std::size_t at =
          allowed.guard_bytes() + static_cast<std::size_t>(element) * static_cast<std::size_t>(allowed.element_bytes());
      std::memcpy(to, now.data() + at, bytes);
      std::memcpy(allowed.data() + at - allowed.guard_bytes(), to, bytes);
    };
    if (tensor == Tensor::output) {
      data_->each_row(tensor, [&](std::int64_t element, std::int64_t row) {
        take(result.output.data() + static_cast<std::size_t>(row) * row_bytes, element, row_bytes);
      });
    } else if (tensor == Tensor::lse && problem.lse != nullptr) {
      data_->each_row(tensor, [&](std::int64_t element, std::int64_t row) {
        take(reinterpret_cast<std::byte*>(&result.lse[static_cast<std::size_t>(row)]), element, sizeof(float));
      });
    }
    if (const std::string where = first_difference(allowed, now); !where.empty()) {
      throw std::runtime_error(std::string("written where nothing may be: ") + tensor_names[i] + ", " + where);
    }
  }
  return result;
}

Stream& shared_stream() {
  static Stream stream;
  return stream;
}

CudaWorkspace& shared_workspace() {
  static CudaWorkspace workspace;
  return workspace;
}

void launch(const AttentionProblem& problem, const Stream& stream, CudaWorkspace& workspace) {
  const std::size_t bytes = attention_workspace_bytes(problem);
  attention(problem, workspace.at_least(bytes), bytes, stream.get());
}

namespace {

void call_on_host(const AttentionProblem& problem, const Call& options) {
  const std::size_t bytes = attention_on_host_workspace_bytes(problem);
  constexpr std::size_t guard = 512 * sizeof(float);
  std::vector<std::byte> content(bytes + guard);
  fill_bytes(content.data(), content.size(), options.scratch, sizeof(float), false);
  Memory workspace(Device::cpu, content.size());
  workspace.upload(content.data(), content.size());
  attention_on_host(problem, bytes == 0 ? nullptr : workspace.data(), bytes, options.parallel_for);
  if (!std::equal(content.begin() + static_cast<std::ptrdiff_t>(bytes), content.end(), workspace.data() + bytes)) {
    throw std::runtime_error("written behind the host workspace");
  }
}

void call_on_cuda(const AttentionProblem& problem) {
  const std::size_t bytes = attention_workspace_bytes(problem);
  CudaWorkspace& workspace = shared_workspace();
  workspace.at_least(bytes);
  std::array<std::byte, 2048> before;
  std::array<std::byte, 2048> after;
  workspace.memory().download(before.data(), before.size(), bytes);
  launch(problem, shared_stream(), workspace);
  shared_stream().wait();
  workspace.memory().download(after.data(), after.size(), bytes);
  if (before != after) {
    throw std::runtime_error("written behind the CUDA workspace");
  }
}

} // namespace

void call(const AttentionProblem& problem, Device device, const Call& options) {
  if (device == Device::cpu) {
    call_on_host(problem, options);
  } else {
    call_on_cuda(problem);
  }
}

Result run(const AttentionData& data, Device device) {
  Placement placement(data, device);
  placement.poison_results(Fill::nan);
  call(placement.problem, device);
  return placement.results();
}

} // namespace single_query::test
