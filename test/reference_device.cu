#include "reference_device.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace single_query::test {
namespace {

constexpr int block_threads = 256;
constexpr std::int64_t most_blocks = 528;

void require(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("double reference on the device: ") + cudaGetErrorName(error));
  }
}

// Device memory that grows and is kept.
template <class T>
class DeviceArray {
public:
  ~DeviceArray() { cudaFree(data_); }
  T* at_least(std::size_t count) {
    if (count > count_) {
      cudaFree(data_);
      data_ = nullptr;
      count_ = 0;
      require(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)));
      count_ = count;
    }
    return data_;
  }
  void download(std::vector<T>& to) const {
    require(cudaMemcpy(to.data(), data_, to.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }

private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

// Where a block works and what it writes; names and shapes as in Reference.
struct Arrays {
  double* weights;          // [blocks, capacity]
  double* added;            // [blocks, capacity]
  std::int64_t* value_rows; // [blocks, capacity]
  double* output;
  double* value_magnitude;
  double* value_total;
  Position* position;
  double* lse;
  double* score_magnitude;
  std::int64_t* keys;
};

// combine over the block's threads, the same in all of them.
template <class Combine>
__device__ double over_block(double value, const Combine& combine) {
  __shared__ double values[block_threads];
  __syncthreads();
  values[threadIdx.x] = value;
  __syncthreads();
  for (int distance = block_threads / 2; distance > 0; distance /= 2) {
    if (threadIdx.x < distance) {
      values[threadIdx.x] = combine(values[threadIdx.x], values[threadIdx.x + distance]);
    }
    __syncthreads();
  }
  return values[0];
}

__device__ double sum_over_block(double value) {
  return over_block(value, [](double a, double b) { return a + b; });
}
__device__ double max_over_block(double value) {
  return over_block(value, [](double a, double b) { return fmax(a, b); });
}

// reference_row(), step by step, by one block.
template <DataType Type>
__device__ void reference_row(const AttentionProblem& p, std::int64_t row, const Arrays& arrays) {
  const std::int64_t b = row / p.query_heads;
  const std::int64_t h = row % p.query_heads;
  const std::int64_t scratch = blockIdx.x * p.max_pages * p.page_size;
  double* weights = arrays.weights + scratch;
  double* added = arrays.added + scratch;
  std::int64_t* value_rows = arrays.value_rows + scratch;

  __shared__ ReferenceKeys keys;
  __syncthreads();
  if (threadIdx.x == 0) {
    keys = reference_keys(p, b);
  }
  __syncthreads();
  const double sink = p.sinks != nullptr ? p.sinks[h * p.sinks_stride] : -INFINITY;
  double max_score = sink;
  double magnitude = 0;
  double count = 0;
  double missing = 0;
  const std::int64_t attended = keys.length - keys.begin;
  for (std::int64_t i = threadIdx.x; i < attended; i += block_threads) {
    const ReferenceScore key = reference_score<Type>(p, b, h, keys.begin + i, keys.length);
    weights[i] = key.score;
    added[i] = key.added_magnitude;
    value_rows[i] = key.included ? key.value_row : no_value;
    missing = key.missing ? 1 : missing;
    if (key.included) {
      ++count;
      max_score = fmax(max_score, key.score);
      magnitude = isfinite(key.dot_magnitude) ? fmax(magnitude, key.dot_magnitude) : magnitude;
    }
  }
  max_score = max_over_block(max_score);
  magnitude = max_over_block(magnitude);
  count = sum_over_block(count);
  missing = max_over_block(missing);

  double any = 0;
  double largest_weight = 0;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < attended; i += block_threads) {
    if (value_rows[i] != no_value) {
      any = weights[i] != -INFINITY ? 1 : any;
      weights[i] = exp(weights[i] - (max_score == -INFINITY ? 0 : max_score));
      sum += weights[i];
      largest_weight = fmax(largest_weight, weights[i]);
    }
  }
  any = max_over_block(any);
  largest_weight = max_over_block(largest_weight);
  sum = sum_over_block(sum) + (p.sinks != nullptr ? exp(sink - (sink == -INFINITY ? 0 : max_score)) : 0);

  double added_that_matters = 0;
  for (std::int64_t i = threadIdx.x; i < attended; i += block_threads) {
    if (value_rows[i] != no_value && weights[i] > least_weight_that_matters * largest_weight) {
      added_that_matters = fmax(added_that_matters, added[i]);
    }
  }
  added_that_matters = max_over_block(added_that_matters);
  for (std::int64_t d = threadIdx.x; d < p.head_dim; d += block_threads) {
    const std::int64_t at = row * p.head_dim + d;
    const ReferenceValue value = any != 0 ? reference_value<Type>(p, d, attended, weights, value_rows)
                                          : ReferenceValue{0, 0, 0, Position::exact};
    arrays.output[at] = missing != 0 ? NAN : any != 0 ? value.sum / sum : 0;
    arrays.value_magnitude[at] = any != 0 ? value.magnitude / sum : 0;
    arrays.value_total[at] = value.total;
    arrays.position[at] = value.position;
  }
  if (threadIdx.x == 0) {
    const double lse = sum == 0 ? -INFINITY : log(sum) + (max_score == -INFINITY ? 0 : max_score);
    arrays.lse[row] = missing != 0 ? NAN : lse;
    arrays.score_magnitude[row] = missing != 0 ? 0 : magnitude + added_that_matters + (isfinite(sink) ? fabs(sink) : 0);
    arrays.keys[row] = static_cast<std::int64_t>(count);
  }
}

template <DataType Type>
__global__ void reference_rows(AttentionProblem p, Arrays arrays) {
  for (std::int64_t row = blockIdx.x; row < p.batch * p.query_heads; row += gridDim.x) {
    reference_row<Type>(p, row, arrays);
  }
}

} // namespace

Reference reference_on_device(const AttentionProblem& p) {
  Reference result = empty_reference(p);
  if (result.rows == 0) {
    return result;
  }
  static DeviceArray<double> weights, added, output, value_magnitude, value_total, lse, score_magnitude;
  static DeviceArray<std::int64_t> value_rows, keys;
  static DeviceArray<Position> position;
  const std::int64_t capacity = p.max_pages * p.page_size;
  const std::int64_t blocks =
      std::min(result.rows, std::max<std::int64_t>(1, std::min(most_blocks, (1 << 26) / (capacity + 1))));
  const auto scratch = static_cast<std::size_t>(blocks * capacity);
  const Arrays arrays = {weights.at_least(scratch),
                         added.at_least(scratch),
                         value_rows.at_least(scratch),
                         output.at_least(result.output.size()),
                         value_magnitude.at_least(result.output.size()),
                         value_total.at_least(result.output.size()),
                         position.at_least(result.output.size()),
                         lse.at_least(result.lse.size()),
                         score_magnitude.at_least(result.lse.size()),
                         keys.at_least(result.lse.size())};
  with_data_type(p.dtype, [&](auto type) {
    reference_rows<decltype(type)::value><<<static_cast<unsigned>(blocks), block_threads>>>(p, arrays);
  });
  require(cudaGetLastError());
  output.download(result.output);
  value_magnitude.download(result.value_magnitude);
  value_total.download(result.value_total);
  position.download(result.position);
  lse.download(result.lse);
  score_magnitude.download(result.score_magnitude);
  keys.download(result.keys);
  return result;
}

} // namespace single_query::test
