#include "single_step.cuh"

#include "device.h"
#include "simt_single_step.cuh"

#include <algorithm>

namespace single_query {
namespace {

template <class Shape>
SingleStepKernel single_step_kernel() {
  return {reinterpret_cast<const void*>(&simt_single_step<Shape>), Shape::warps, Shape::cluster_size, Shape::general};
}

// general: with what only the general variant knows.
template <typename Scalar, int vectors>
SingleStepKernel select_single_step(bool general, std::uint32_t keys, std::int64_t rows, const DeviceTraits& device) {
  using SmallBlock = SingleStepShape<Scalar, vectors, 8, 2, 1>;
  using Block = SingleStepShape<Scalar, vectors, 8, 4, 1>;
  using GeneralBlock = SingleStepShape<Scalar, vectors, 8, 4, 1, true>;
  using SmallCluster = SingleStepShape<Scalar, vectors, 4, 2, 8>;
  using LargeCluster = SingleStepShape<Scalar, vectors, 8, 4, 8>;
  const bool clusters = device.has_clusters && rows * SmallCluster::cluster_size <= device.multiprocessors;
  // One block where that is fast or the only way. The same for all numbers of keys that the general variant takes.
  if (keys <= Block::most_keys && (vectors == 1 || !clusters)) {
    return general                         ? single_step_kernel<GeneralBlock>()
           : keys <= SmallBlock::most_keys ? single_step_kernel<SmallBlock>()
                                           : single_step_kernel<Block>();
  }
  if (!clusters || keys > LargeCluster::most_keys) {
    return {};
  }
  if (!general) {
    return keys <= SmallCluster::most_keys ? single_step_kernel<SmallCluster>() : single_step_kernel<LargeCluster>();
  }
  if constexpr (vectors > 1) {
    using GeneralCluster = SingleStepShape<Scalar, vectors, 4, 2, 8, true>;
    if (keys <= GeneralCluster::most_keys) {
      return single_step_kernel<GeneralCluster>();
    }
  }
  return {};
}

template <typename Scalar>
SingleStepKernel select_single_step(std::int64_t head_dim, bool general, std::uint32_t keys, std::int64_t rows,
                                    const DeviceTraits& device) {
  return head_dim <= 32   ? select_single_step<Scalar, 1>(general, keys, rows, device)
         : head_dim <= 64 ? select_single_step<Scalar, 2>(general, keys, rows, device)
                          : select_single_step<Scalar, 4>(general, keys, rows, device);
}

} // namespace

SingleStepKernel select_single_step(const KernelArguments& args, const DeviceTraits& device) {
  const AttentionProblem& problem = args.problem;
  if (args.group != 1 || problem.head_dim > 128 || problem.split_size > 0 ||
      std::max(problem.batch, problem.kv_heads) > 65535) { // of a grid
    return {};
  }
  const std::int64_t rows = problem.batch * problem.kv_heads;
  const std::uint32_t keys = args.uniform.keys.end - args.uniform.keys.begin; // at most
  const std::int64_t stride = std::max(problem.key_stride_slot, problem.value_stride_slot);
  constexpr std::int64_t most_stride = 1 << 18; // so that the offsets of rows, in bytes, fit into 32 bits
  const bool general = args.modified || problem.lengths != nullptr || keys == 0 || stride > most_stride ||
                       std::min({args.query_copy_bytes, args.key_copy_bytes, args.value_copy_bytes}) < 16;
  switch (problem.dtype) {
  case DataType::float16:
    return select_single_step<__half>(problem.head_dim, general, keys, rows, device);
  case DataType::bfloat16:
    return select_single_step<__nv_bfloat16>(problem.head_dim, general, keys, rows, device);
  default:
    return select_single_step<float>(problem.head_dim, general, keys, rows, device);
  }
}

void launch_single_step(const SingleStepKernel& kernel, const KernelArguments& general, cudaStream_t stream) {
  const AttentionProblem& problem = general.problem;
  const KeyRange keys = general.uniform.keys;
  GeneralStepArguments args{};
  const std::int64_t element = bytes_of(problem.dtype);
  args.query = problem.query;
  args.key = static_cast<const char*>(problem.key) + keys.begin * problem.key_stride_slot * element;
  args.value = static_cast<const char*>(problem.value) + keys.begin * problem.value_stride_slot * element;
  args.key_row_bytes = static_cast<std::uint32_t>(problem.key_stride_slot * element);
  args.value_row_bytes = static_cast<std::uint32_t>(problem.value_stride_slot * element);
  args.keys = keys.end - keys.begin;
  args.head_dim = static_cast<std::uint32_t>(problem.head_dim);
  args.scale = problem.scale;
  args.output = problem.output;
  args.query_stride_batch = problem.query_stride_batch;
  args.query_stride_head = problem.query_stride_head;
  args.key_stride_batch = problem.key_stride_page;
  args.key_stride_head = problem.key_stride_head;
  args.value_stride_batch = problem.value_stride_page;
  args.value_stride_head = problem.value_stride_head;
  args.output_stride_batch = problem.output_stride_batch;
  args.output_stride_head = problem.output_stride_head;
  args.lse = problem.lse;
  args.lse_stride_batch = problem.lse_stride_batch;
  args.lse_stride_head = problem.lse_stride_head;
  args.sinks = problem.sinks;
  args.sinks_stride = problem.sinks_stride;
  if (kernel.general) {
    const int vector_bytes = static_cast<int>(4 * element);
    args.problem = problem;
    args.query_vectors = general.query_copy_bytes >= vector_bytes;
    args.key_vectors = general.key_copy_bytes >= vector_bytes;
    args.value_vectors = general.value_copy_bytes >= vector_bytes;
  }
  launch({kernel.function,
          dim3(static_cast<unsigned>(kernel.cluster_size), static_cast<unsigned>(problem.kv_heads),
               static_cast<unsigned>(problem.batch)),
          static_cast<unsigned>(kernel.warps * 32), 0, kernel.cluster_size, stream},
         &args); // the others begin with the same members
}

} // namespace single_query
