#include "benchmark_inputs.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace single_query::benchmark {
namespace {

constexpr std::int64_t most_caches = 2048;

std::int64_t pages_for(std::int64_t keys, std::int64_t page_size) {
  return (keys + page_size - 1) / page_size;
}

// Pages of all sequences, each in a place of its own: int32 [batch, max_pages].
at::Tensor shuffled_page_table(const Problem& problem, std::int64_t pages) {
  const at::Tensor order = at::randperm(pages, at::kInt);
  at::Tensor table = at::full({problem.batch, pages_for(problem.keys, problem.page_size)}, -1, at::kInt);
  std::int64_t used = 0;
  for (std::int64_t row = 0; row < problem.batch; ++row) {
    const std::int64_t count = pages_for(problem.length(row), problem.page_size);
    table.select(0, row).narrow(0, 0, count).copy_(order.narrow(0, used, count));
    used += count;
  }
  return table;
}

// Keys or values of one sequence up to its length: [kv_heads, length, head_dim].
at::Tensor sequence(const Problem& problem, const Inputs& inputs, const at::Tensor& cache, std::int64_t row) {
  const std::int64_t length = problem.length(row);
  if (!inputs.page_table) {
    return cache.select(0, row).narrow(1, 0, length);
  }
  const at::Tensor pages =
      inputs.page_table->select(0, row).narrow(0, 0, pages_for(length, problem.page_size)); // [pages of the row]
  return cache.index_select(0, pages).transpose(0, 1).flatten(1, 2).narrow(1, 0, length);
}

// Attention of `heads` KV heads of one sequence. Shapes: [kv_heads, group, ...].
struct RowExpected {
  at::Tensor output;
  at::Tensor bound;
};

// query: float64 [kv_heads, group, head_dim]; key, value: float64 [kv_heads, keys, head_dim], the attended keys alone;
// bias: float64, broadcastable to [kv_heads, group, keys], -inf excludes; sink: float64 [kv_heads, group, 1].
RowExpected attend(const Problem& problem, double scale, const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& value, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& sink) {
  const at::Tensor transposed_key = key.transpose(1, 2);
  at::Tensor scores = at::matmul(query, transposed_key) * scale; // [kv_heads, group, keys]
  // How large the terms of a score are, and with them their rounding errors: [kv_heads, group, 1].
  at::Tensor magnitude = (at::matmul(query.abs(), transposed_key.abs()) * scale).amax(-1, true);
  if (problem.softcap) {
    scores = softcap_value * at::tanh(scores / softcap_value);
    magnitude = magnitude + magnitude.clamp_max(softcap_value);
  }
  if (bias) {
    scores = scores + *bias;
  }
  at::Tensor lse = at::logsumexp(scores, -1, true);
  if (sink) {
    lse = at::logaddexp(lse, *sink);
    magnitude = magnitude + sink->abs();
  }
  const at::Tensor weights = at::exp(scores - lse);
  if (bias) {
    // Only of keys whose weight is more than a rounding error.
    const at::Tensor matters = weights > 0x1p-24 * weights.amax(-1, true);
    magnitude = magnitude + at::where(matters, bias->abs(), 0.0).amax(-1, true);
  }
  const at::Tensor output = at::matmul(weights, value);
  const at::Tensor absolute = at::matmul(weights, value.abs());

  // Twice the error expected of a summation in float32 with few levels of merging and one rounding to the dtype.
  const double unit = 0x1p-24;
  const double dtype_unit = problem.dtype == at::kFloat ? unit : problem.dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
  const double subnormal = problem.dtype == at::kHalf ? 0x1p-25 : 0.0;
  const double rounded_weights = problem.dtype == at::kFloat ? 0.0 : dtype_unit;
  const double summation = 8 + 2 * std::log2(static_cast<double>(std::max<std::int64_t>(key.size(1), 2)));
  const at::Tensor bound =
      dtype_unit * output.abs() + subnormal + absolute * (unit * (magnitude + summation) + rounded_weights);
  return {output, 2 * bound};
}

} // namespace

double Inputs::scale() const {
  return 1.0 / std::sqrt(static_cast<double>(query.size(-1)));
}

Inputs make_inputs(const Problem& problem, at::Device device, double cold_bytes, double memory_limit) {
  const at::TensorOptions options = at::TensorOptions().device(device).dtype(problem.dtype);
  const at::TensorOptions float_options = options.dtype(at::kFloat);

  Inputs inputs;
  inputs.query = at::randn({problem.batch, problem.query_heads, 1, problem.head_dim}, options);

  // Rows of the cache as it is stored: sequences of `keys` slots, or pages of `page_size`.
  std::int64_t blocks = problem.batch;
  std::int64_t slots = problem.keys;
  if (problem.page_size > 0) {
    blocks = 0;
    slots = problem.page_size;
    for (std::int64_t row = 0; row < problem.batch; ++row) {
      blocks += pages_for(problem.length(row), problem.page_size);
    }
    inputs.page_table = shuffled_page_table(problem, blocks).to(device);
  }
  const double stored_bytes = 2.0 * static_cast<double>(blocks * slots * problem.kv_heads * problem.head_dim) *
                              static_cast<double>(c10::elementSize(problem.dtype));
  std::int64_t caches = 1;
  if (!problem.warm) {
    const double wanted = std::max(2.0, std::ceil(cold_bytes / problem.bytes()));
    const double possible = std::max(1.0, std::floor(memory_limit / stored_bytes));
    caches = std::min(static_cast<std::int64_t>(std::min(wanted, possible)), most_caches);
  }
  const at::Tensor keys = at::randn({caches, blocks, slots, problem.kv_heads, problem.head_dim}, options);
  const at::Tensor values = at::randn({caches, blocks, slots, problem.kv_heads, problem.head_dim}, options);
  for (std::int64_t cache = 0; cache < caches; ++cache) {
    inputs.key.push_back(keys.select(0, cache).transpose(1, 2));
    inputs.value.push_back(values.select(0, cache).transpose(1, 2));
  }

  if (problem.lengths != Lengths::none) {
    std::vector<std::int32_t> lengths;
    for (std::int64_t row = 0; row < problem.batch; ++row) {
      lengths.push_back(static_cast<std::int32_t>(problem.length(row)));
    }
    inputs.lengths = at::tensor(lengths, at::kInt).to(device);
  }
  if (problem.mask == Mask::boolean) {
    inputs.mask = at::rand({problem.batch, 1, 1, problem.keys}, float_options) < 0.75;
  } else if (problem.mask == Mask::additive) {
    inputs.mask = at::randn({problem.batch, 1, 1, problem.keys}, options);
  }
  if (problem.alibi) {
    const at::Tensor head = at::arange(1, problem.query_heads + 1, float_options);
    inputs.alibi_slopes = at::exp2(head * (-8.0 / static_cast<double>(problem.query_heads)));
  }
  if (problem.sinks) {
    inputs.sinks = at::randn({problem.query_heads}, float_options);
  }
  return inputs;
}

Expected expected_output(const Problem& problem, const Inputs& inputs, std::int64_t cache) {
  // So many elements of a cache are turned into double at once, in whole heads.
  constexpr std::int64_t elements_at_once = std::int64_t{1} << 27;
  const std::int64_t group = problem.group();
  const auto at_cache = static_cast<std::size_t>(cache);
  const auto by_kv_head = [&](const at::Tensor& per_query_head) { // [query_heads] -> [kv_heads, group, 1]
    return per_query_head.to(at::kDouble).view({problem.kv_heads, group, 1});
  };
  Expected expected;
  expected.output =
      at::empty({problem.batch, problem.query_heads, problem.head_dim}, inputs.query.options().dtype(at::kDouble));
  expected.bound = at::empty_like(expected.output);

  for (std::int64_t row = 0; row < problem.batch; ++row) {
    const std::int64_t length = problem.length(row);
    const std::int64_t attended = problem.attended(row);
    const std::int64_t first = length - attended;
    const at::Tensor key = sequence(problem, inputs, inputs.key[at_cache], row).narrow(1, first, attended);
    const at::Tensor value = sequence(problem, inputs, inputs.value[at_cache], row).narrow(1, first, attended);
    const at::Tensor query = inputs.query.select(0, row).view({problem.kv_heads, group, problem.head_dim});

    std::optional<at::Tensor> bias; // [kv_heads or 1, group or 1, attended]
    if (inputs.alibi_slopes) {
      const at::Tensor distance = at::arange(1 - attended, 1, expected.output.options());
      bias = by_kv_head(*inputs.alibi_slopes) * distance;
    }
    if (inputs.mask) {
      const at::Tensor mask = inputs.mask->select(0, row).narrow(-1, first, attended);
      const at::Tensor added = problem.mask == Mask::boolean
                                   ? at::where(mask, 0.0, -std::numeric_limits<double>::infinity()).to(at::kDouble)
                                   : mask.to(at::kDouble);
      bias = bias ? *bias + added : added;
    }
    const std::int64_t heads_at_once =
        std::clamp<std::int64_t>(elements_at_once / (attended * problem.head_dim), 1, problem.kv_heads);
    for (std::int64_t head = 0; head < problem.kv_heads; head += heads_at_once) {
      const std::int64_t heads = std::min(heads_at_once, problem.kv_heads - head);
      const auto part = [&](const at::Tensor& tensor) { return tensor.narrow(0, head, heads).to(at::kDouble); };
      const auto part_of = [&](const std::optional<at::Tensor>& tensor) {
        return tensor && tensor->size(0) == problem.kv_heads ? std::optional(part(*tensor)) : tensor;
      };
      const std::optional<at::Tensor> sinks = inputs.sinks ? std::optional(by_kv_head(*inputs.sinks)) : std::nullopt;
      const RowExpected result =
          attend(problem, inputs.scale(), part(query), part(key), part(value), part_of(bias), part_of(sinks));
      const auto place = [&](const at::Tensor& whole, const at::Tensor& heads_of_it) {
        whole.select(0, row).narrow(0, head * group, heads * group).copy_(heads_of_it.flatten(0, 1));
      };
      place(expected.output, result.output);
      place(expected.bound, result.bound);
    }
  }
  return expected;
}

std::string fault(const Expected& expected, const at::Tensor& output) {
  const at::Tensor error = (output.reshape(expected.output.sizes()).to(at::kDouble) - expected.output).abs();
  // NaN as infinity; an element that is exactly right may have a bound of 0.
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor ratio = at::where(error == 0.0, 0.0, error / expected.bound);
  const double worst = at::nan_to_num(ratio, infinity, infinity).max().item<double>();
  return worst <= 1.0 ? std::string() : "the largest error is " + std::to_string(worst) + " times its bound";
}

std::string gross_fault(const Expected& expected, const at::Tensor& output) {
  constexpr double most = 0.05; // scores rounded to bfloat16 alone give 0.01
  const at::Tensor error = output.reshape(expected.output.sizes()).to(at::kDouble) - expected.output;
  const double relative = (error.norm() / expected.output.norm()).item<double>();
  return relative <= most ? std::string() : "its relative error is " + std::to_string(relative);
}

} // namespace single_query::benchmark
