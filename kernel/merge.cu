// merge(): attention over the union of disjoint sets of keys from the output and log-sum-exp of each.
#include "convert.cuh"
#include "device.h"
#include "validate.h"

#include <algorithm>

namespace single_query {
namespace {

constexpr int merge_threads = 128;

// One warp a row of [batch, heads]; a lane merges every 32nd of its head dims. The weights of a row's parts are the
// same for all dims, so each lane computes them by itself. grid: enough warps, any number of blocks.
template <typename Scalar>
__global__ void __launch_bounds__(merge_threads) merge_rows(const __grid_constant__ MergeProblem problem) {
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (merge_threads / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * merge_threads + threadIdx.x) / 32;
       row < problem.batch * problem.heads; row += warps) {
    const std::int64_t batch = row / problem.heads;
    const std::int64_t head = row - batch * problem.heads;
    const float* lse = problem.lse + batch * problem.lse_stride_batch + head * problem.lse_stride_head;
    const Scalar* outputs = static_cast<const Scalar*>(problem.outputs) + batch * problem.outputs_stride_batch +
                            head * problem.outputs_stride_head;
    Scalar* output =
        static_cast<Scalar*>(problem.output) + batch * problem.output_stride_batch + head * problem.output_stride_head;
    for (int dim = lane; dim < problem.head_dim; dim += 32) {
      SoftmaxState<1> total, chain;
      for (std::int64_t part = 0; part < problem.parts; ++part) {
        const float part_lse = lse[part * problem.lse_stride_part];
        if (part_lse != negative_infinity) {
          chain.merge(
              {part_lse, 1.0f, {to_float(outputs[part * problem.outputs_stride_part + dim]) * wide_value_scale}});
        }
        if (part % chain_length == chain_length - 1) {
          total.merge_chain(chain);
        }
      }
      total.merge_chain(chain);
      output[dim] = from_float<Scalar>(total.output(0, wide_value_scale));
      if (dim == 0 && problem.output_lse != nullptr) {
        problem.output_lse[batch * problem.output_lse_stride_batch + head * problem.output_lse_stride_head] =
            total.log_sum_exp();
      }
    }
  }
}

const void* select_kernel(DataType dtype) {
  switch (dtype) {
  case DataType::float16:
    return reinterpret_cast<const void*>(&merge_rows<__half>);
  case DataType::bfloat16:
    return reinterpret_cast<const void*>(&merge_rows<__nv_bfloat16>);
  default:
    return reinterpret_cast<const void*>(&merge_rows<float>);
  }
}

} // namespace

void merge(const MergeProblem& problem, cudaStream_t stream) {
  validate(problem);
  const std::int64_t rows = problem.batch * problem.heads;
  if (rows == 0) {
    return;
  }
  const Device device = current_device();
  constexpr std::int64_t rows_per_block = merge_threads / 32;
  const std::int64_t blocks =
      std::min<std::int64_t>((rows + rows_per_block - 1) / rows_per_block, 16ll * device.traits.multiprocessors);
  launch({select_kernel(problem.dtype), dim3(static_cast<unsigned>(blocks)), merge_threads, 0, 1, stream}, &problem);
}

} // namespace single_query
