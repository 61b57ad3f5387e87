#include "benchmark_implementations.h"

#include "single_query/attention.h"
#include "single_query/torch.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>

#include <cmath>
#include <limits>

namespace single_query::benchmark {
namespace {

struct Cache {
  at::Tensor key; // [batch, kv_heads, keys, head_dim]
  at::Tensor value;
};
using MakeCache = std::function<Cache(std::int64_t cache)>;

AttentionOptions options_of(const Problem& problem, const Inputs& inputs) {
  AttentionOptions options;
  options.attn_mask = inputs.mask;
  options.lengths = inputs.lengths;
  options.page_table = inputs.page_table;
  options.window = problem.window > 0 ? std::optional(problem.window) : std::nullopt;
  options.softcap = problem.softcap ? softcap_value : 0.0;
  options.alibi_slopes = inputs.alibi_slopes;
  options.sinks = inputs.sinks;
  return options;
}

Implementation through_tensors(const Problem& problem, const Inputs& inputs, Mode mode) {
  const AttentionOptions options = options_of(problem, inputs);
  if (mode != Mode::graph) {
    return {"single_query",
            [&inputs, options](std::int64_t cache) {
              const auto at = static_cast<std::size_t>(cache);
              return attention(inputs.query, inputs.key[at], inputs.value[at], options);
            },
            Backend::automatic, true};
  }
  const at::Tensor all_outputs =
      inputs.query.new_empty({inputs.caches(), problem.batch, problem.query_heads, 1, problem.head_dim});
  const std::vector<at::Tensor> outputs = all_outputs.unbind(0);
  return {"single_query",
          [&inputs, options, outputs](std::int64_t cache) {
            const auto at = static_cast<std::size_t>(cache);
            at::Tensor output = outputs[at];
            return attention_out(output, inputs.query, inputs.key[at], inputs.value[at], options);
          },
          Backend::automatic, true, all_outputs};
}

// A plain float32 problem on the current CUDA device.
Implementation through_pointers(const Problem& problem, const Inputs& inputs) {
  AttentionProblem raw = contiguous_problem(DataType::float32, problem.batch, problem.query_heads, problem.kv_heads,
                                            problem.keys, problem.head_dim);
  const at::Tensor output = at::empty_like(inputs.query);
  raw.query = inputs.query.const_data_ptr();
  raw.output = output.mutable_data_ptr();
  std::vector<at::Tensor> keep;
  std::vector<AttentionProblem> problems; // one a cache
  for (std::size_t cache = 0; cache < inputs.key.size(); ++cache) {
    keep.push_back(inputs.key[cache].contiguous()); // as contiguous_problem() wants it
    raw.key = keep.back().const_data_ptr();
    keep.push_back(inputs.value[cache].contiguous());
    raw.value = keep.back().const_data_ptr();
    problems.push_back(raw);
  }
  const std::size_t workspace_bytes = attention_workspace_bytes(problems.front());
  keep.push_back(at::zeros({static_cast<std::int64_t>(workspace_bytes)}, output.options().dtype(at::kByte)));
  void* const workspace = keep.back().mutable_data_ptr();
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  return {"single_query_raw",
          [=](std::int64_t cache) {
            single_query::attention(problems[static_cast<std::size_t>(cache)], workspace, workspace_bytes, stream);
            return at::Tensor(output);
          },
          Backend::automatic, true};
}

// The keys that are attended to where all sequences have as many, which is a slice of a contiguous cache; else the
// whole of it, for a mask to tell them apart.
MakeCache slice(const Problem& problem, const Inputs& inputs) {
  const std::int64_t attended = problem.uniform() ? problem.attended(0) : problem.keys;
  const std::int64_t first = problem.keys - attended;
  return [&inputs, first, attended](std::int64_t cache) {
    const auto at = static_cast<std::size_t>(cache);
    return Cache{inputs.key[at].narrow(2, first, attended), inputs.value[at].narrow(2, first, attended)};
  };
}

// The same of a paged cache: a copy of the pages that hold them.
MakeCache gather(const Problem& problem, const Inputs& inputs) {
  const std::int64_t attended = problem.attended(0);
  const std::int64_t first = problem.keys - attended;
  const std::int64_t first_page = first / problem.page_size;
  const std::int64_t pages = inputs.page_table->size(1) - first_page;
  const at::Tensor wanted = inputs.page_table->narrow(1, first_page, pages).flatten(); // [batch * pages]
  const std::int64_t batch = problem.batch;
  const std::int64_t offset = first - first_page * problem.page_size;
  const auto contiguous = [=](const at::Tensor& pool) { // [P, kv_heads, page_size, head_dim]
    const at::Tensor rows =
        pool.transpose(1, 2).index_select(0, wanted).view({batch, pages * pool.size(2), pool.size(1), pool.size(3)});
    return rows.transpose(1, 2).narrow(2, offset, attended);
  };
  return [&inputs, contiguous](std::int64_t cache) {
    const auto at = static_cast<std::size_t>(cache);
    return Cache{contiguous(inputs.key[at]), contiguous(inputs.value[at])};
  };
}

// [batch, query_heads, 1, head_dim] -> [batch, kv_heads, group, head_dim]
at::Tensor grouped(const Problem& problem, const at::Tensor& query) {
  return query.view({problem.batch, problem.kv_heads, problem.group(), problem.head_dim});
}

// mask: [batch, 1 or query_heads, 1, keys] of what SDPA takes, or nothing.
Implementation sdpa(const std::string& name, Backend backend, const Problem& problem, const Inputs& inputs,
                    const MakeCache& cache_of, const std::optional<at::Tensor>& mask, bool group_as_queries) {
  std::optional<at::Tensor> attn_mask = mask;
  if (group_as_queries && mask && mask->size(1) > 1) {
    attn_mask = mask->view({mask->size(0), problem.kv_heads, problem.group(), mask->size(3)});
  }
  const at::Tensor query = group_as_queries ? grouped(problem, inputs.query) : inputs.query;
  const bool enable_gqa = !group_as_queries && problem.group() > 1;
  return {name,
          [=](std::int64_t cache) {
            const Cache keys_and_values = cache_of(cache);
            return at::scaled_dot_product_attention(query, keys_and_values.key, keys_and_values.value, attn_mask,
                                                    /*dropout_p=*/0.0, /*is_causal=*/false, /*scale=*/std::nullopt,
                                                    enable_gqa);
          },
          backend};
}

Implementation matmul_softmax(const Problem& problem, const Inputs& inputs, const MakeCache& cache_of,
                              const std::optional<at::Tensor>& mask) {
  const at::Tensor query = grouped(problem, inputs.query);
  const double scale = inputs.scale();
  std::optional<at::Tensor> sinks; // [batch, kv_heads, group, 1]
  if (inputs.sinks) {
    sinks = inputs.sinks->to(query.scalar_type())
                .view({1, problem.kv_heads, problem.group(), 1})
                .expand({problem.batch, problem.kv_heads, problem.group(), 1});
  }
  const bool softcap = problem.softcap;
  return {"matmul_softmax", [=](std::int64_t cache) {
            const Cache keys_and_values = cache_of(cache);
            at::Tensor scores = at::matmul(query * scale, keys_and_values.key.transpose(2, 3));
            if (softcap) {
              scores = at::tanh(scores / softcap_value) * softcap_value;
            }
            if (mask) {
              scores = mask->scalar_type() == at::kBool
                           ? scores.masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity())
                           : scores + *mask;
            }
            if (!sinks) {
              return at::matmul(at::softmax(scores, -1), keys_and_values.value);
            }
            const at::Tensor weights = at::softmax(at::cat({scores, *sinks}, -1), -1);
            return at::matmul(weights.narrow(-1, 0, scores.size(-1)), keys_and_values.value);
          }};
}

// Lengths or slopes through the operator below SDPA. Contiguous cache of the whole capacity.
Implementation flash_forward(const Problem& problem, const Inputs& inputs) {
  const at::TensorOptions index = inputs.query.options().dtype(at::kInt);
  const at::Tensor query_starts = at::arange(problem.batch + 1, index);
  const at::Tensor query = inputs.query.select(2, 0); // [batch, query_heads, head_dim]
  const std::int64_t keys = problem.keys;
  return {"flash_forward", [=, &inputs](std::int64_t cache) {
            const auto at = static_cast<std::size_t>(cache);
            const auto packed = [](const at::Tensor& tensor) { return tensor.transpose(1, 2).flatten(0, 1); };
            return std::get<0>(at::_flash_attention_forward(
                query, packed(inputs.key[at]), packed(inputs.value[at]), query_starts, query_starts * keys, 1, keys,
                /*dropout_p=*/0.0, /*is_causal=*/false, /*return_debug_mask=*/false, /*scale=*/std::nullopt,
                /*window_size_left=*/std::nullopt, /*window_size_right=*/std::nullopt, inputs.lengths,
                inputs.alibi_slopes));
          }};
}

// Sequences of different lengths out of pages: the used slots are copied one after the other.
Implementation gather_flash_forward(const Problem& problem, const Inputs& inputs) {
  const at::TensorOptions index = inputs.query.options().dtype(at::kInt);
  const at::Tensor query_starts = at::arange(problem.batch + 1, index);
  const at::Tensor query = inputs.query.select(2, 0);
  std::vector<at::Tensor> slots; // of each row: [length]
  for (std::int64_t row = 0; row < problem.batch; ++row) {
    const at::Tensor key = at::arange(problem.length(row), index.dtype(at::kLong));
    const at::Tensor page = inputs.page_table->select(0, row).index_select(0, at::floor_divide(key, problem.page_size));
    slots.push_back(page * problem.page_size + at::remainder(key, problem.page_size));
  }
  const at::Tensor wanted = at::cat(slots);
  const at::Tensor key_starts = at::cat({at::zeros({1}, index), at::cumsum(*inputs.lengths, 0, at::kInt)}).to(at::kInt);
  const std::int64_t keys = problem.keys;
  return {"gather_flash_forward", [=, &inputs](std::int64_t cache) {
            const auto at = static_cast<std::size_t>(cache);
            const auto packed = [&](const at::Tensor& pool) {
              return pool.transpose(1, 2).flatten(0, 1).index_select(0, wanted);
            };
            return std::get<0>(at::_flash_attention_forward(
                query, packed(inputs.key[at]), packed(inputs.value[at]), query_starts, key_starts, 1, keys,
                /*dropout_p=*/0.0, /*is_causal=*/false, /*return_debug_mask=*/false));
          }};
}

// What SDPA can be given for lengths, mask and slopes: [batch or 1, query_heads or 1, 1, keys].
std::optional<at::Tensor> mask_for_sdpa(const Problem& problem, const Inputs& inputs) {
  if (inputs.mask) {
    return inputs.mask;
  }
  if (!problem.uniform()) {
    const at::Tensor key = at::arange(problem.keys, inputs.lengths->options());
    return key.view({1, 1, 1, problem.keys}) < inputs.lengths->view({problem.batch, 1, 1, 1});
  }
  if (inputs.alibi_slopes) {
    const at::Tensor distance = at::arange(1 - problem.keys, 1, inputs.alibi_slopes->options());
    const at::Tensor bias = inputs.alibi_slopes->view({1, problem.query_heads, 1, 1}) * distance;
    return bias.to(problem.dtype);
  }
  return std::nullopt;
}

} // namespace

void Implementation::select() const {
  at::Context& context = at::globalContext();
  const bool automatic = backend == Backend::automatic;
  context.setSDPUseFlash(automatic || backend == Backend::flash);
  context.setSDPUseMemEfficient(automatic || backend == Backend::efficient);
  context.setSDPUseCuDNN(automatic || backend == Backend::cudnn);
  context.setSDPUseMath(automatic || backend == Backend::math);
}

std::vector<Implementation> implementations(const Problem& problem, const Inputs& inputs, Mode mode) {
  std::vector<Implementation> all = {through_tensors(problem, inputs, mode)};
  if (mode == Mode::host) {
    all.push_back(through_pointers(problem, inputs));
  }
  const bool cuda = inputs.query.is_cuda();
  const bool paged = problem.page_size > 0;
  if (paged && !problem.uniform()) {
    all.push_back(gather_flash_forward(problem, inputs));
    return all;
  }
  const MakeCache cache_of = paged ? gather(problem, inputs) : slice(problem, inputs);
  const std::string prefix = paged ? "gather_" : "";
  const std::optional<at::Tensor> mask = mask_for_sdpa(problem, inputs);
  const auto add_sdpa = [&](const std::string& name, Backend backend, bool group_as_queries) {
    all.push_back(sdpa(prefix + name, backend, problem, inputs, cache_of, mask, group_as_queries));
  };

  // SDPA has neither a softcap nor sinks.
  if (!problem.softcap && !problem.sinks) {
    if (!cuda) {
      add_sdpa("sdpa", Backend::automatic, false);
      if (problem.group() > 1) {
        add_sdpa("sdpa_grouped", Backend::automatic, true);
      }
    } else {
      if (mode != Mode::graph) {
        add_sdpa("sdpa", Backend::automatic, false);
      }
      if (mode != Mode::host) {
        if (!mask) {
          add_sdpa("sdpa_flash", Backend::flash, false);
        }
        add_sdpa("sdpa_cudnn", Backend::cudnn, false);
        add_sdpa("sdpa_efficient", Backend::efficient, true);
        if (!paged && !mask) {
          add_sdpa("sdpa_math", Backend::math, true);
        }
      }
    }
  }
  if (cuda && (inputs.alibi_slopes || !problem.uniform())) {
    all.push_back(flash_forward(problem, inputs));
  }
  if (!paged) {
    const bool per_head = mask && mask->size(1) > 1;
    all.push_back(
        matmul_softmax(problem, inputs, cache_of,
                       per_head ? mask->view({mask->size(0), problem.kv_heads, problem.group(), problem.keys}) : mask));
  }
  return all;
}

} // namespace single_query::benchmark
