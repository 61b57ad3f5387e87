// Greedy decoding of a small transformer with a growing KV cache, contiguous and then paged, through single_query. On
// CUDA one decode step is captured in a graph once and replayed for every token: lengths and page table are on the
// device, so nothing in it depends on how long the rows have become.
//
// Tokens and logits are checked against the same model computed with scaled_dot_product_attention over the whole
// prefix at every step. Exit status: 0 equal, 1 different, 2 bad usage or no such device.
#include "generate_model.h"
#include "single_query/torch.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Flags.h>
#include <torch/cuda.h>

#include <chrono>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>

C10_DEFINE_string(device, "auto", "cpu or cuda; auto: CUDA where there is a GPU");

namespace {

using Prompts = std::vector<std::vector<std::int64_t>>; // the tokens of each row

constexpr std::int64_t capacity = 128; // keys that the cache has room for, per row
constexpr std::int64_t page_size = 16;
constexpr std::int64_t steps = 32; // tokens to generate, per row
constexpr std::int64_t vocabulary = ModelShape{}.vocabulary;

// Keys and values of one layer: [row, capacity, Hkv, D], or pages [P, page_size, Hkv, D] in which a row's keys are
// found by the page table.
struct LayerCache {
  torch::Tensor key;
  torch::Tensor value;
};

class Cache {
public:
  Cache(const ModelShape& shape, std::int64_t rows, bool paged, torch::Device device) {
    const std::int64_t pages_per_row = capacity / page_size;
    // Whatever is not filled may hold anything: here NaN, and entries that name no page.
    const auto unfilled = [&](std::int64_t blocks, std::int64_t slots) {
      return torch::full({blocks, slots, shape.kv_heads, shape.head_dim}, std::nan(""), device);
    };
    if (paged) {
      page_table_ = torch::full({rows, pages_per_row}, -1, torch::dtype(torch::kInt).device(device));
      free_pages_ = torch::randperm(rows * pages_per_row, torch::kLong);
    }
    for (std::int64_t i = 0; i < shape.layers; ++i) {
      const auto make = [&] { return paged ? unfilled(rows * pages_per_row, page_size) : unfilled(rows, capacity); };
      layers_.push_back({make(), make()});
    }
  }

  const std::optional<torch::Tensor>& page_table() const { return page_table_; }
  const LayerCache& layer(std::size_t i) const { return layers_[i]; }

  // Host side, between steps: gives row `row` room for a key at `position`.
  void reserve(std::int64_t row, std::int64_t position) {
    if (page_table_ && position % page_size == 0) {
      page_table_->index_put_({row, position / page_size}, free_pages_[used_pages_++].item<std::int32_t>());
    }
  }

  // rows, positions: int64 [n]; key, value: [n, Hkv, D], stored as key `positions[i]` of row `rows[i]`. All on the
  // device, so that it can be captured.
  void store(std::size_t layer, const torch::Tensor& rows, const torch::Tensor& positions, const torch::Tensor& key,
             const torch::Tensor& value) {
    torch::Tensor block = rows;
    torch::Tensor slot = positions;
    if (page_table_) {
      block = page_table_->index({rows, positions.floor_divide(page_size)}).to(torch::kLong);
      slot = positions.remainder(page_size);
    }
    layers_[layer].key.index_put_({block, slot}, key);
    layers_[layer].value.index_put_({block, slot}, value);
  }

private:
  std::vector<LayerCache> layers_;
  std::optional<torch::Tensor> page_table_; // int32 [rows, capacity / page_size]
  torch::Tensor free_pages_;
  std::int64_t used_pages_ = 0;
};

struct Generated {
  torch::Tensor tokens; // int64 [steps, rows]
  torch::Tensor logits; // float32 [steps, rows, vocabulary]
  double seconds = 0;
};

torch::Tensor to_tensor(const std::vector<std::int64_t>& tokens, torch::Device device) {
  return torch::tensor(tokens, torch::kLong).to(device).unsqueeze(0); // [1, T]
}

// Causal attention within the T tokens that are given, by LibTorch.
torch::Tensor causal_attention(const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value) {
  return at::scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                                          /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                          /*scale=*/std::nullopt, /*enable_gqa=*/true)
      .transpose(1, 2);
}

void synchronize(torch::Device device) {
  if (device.is_cuda()) {
    torch::cuda::synchronize();
  }
}

template <typename Body>
double seconds_of(torch::Device device, const Body& body) {
  synchronize(device);
  const auto start = std::chrono::steady_clock::now();
  body();
  synchronize(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Without a cache: the whole prefix of every row again for each token.
Generated generate_without_cache(const Model& model, Prompts prompts, torch::Device device) {
  Generated result;
  std::vector<torch::Tensor> tokens, logits;
  result.seconds = seconds_of(device, [&] {
    for (std::int64_t step = 0; step < steps; ++step) {
      std::vector<torch::Tensor> row_logits;
      for (const std::vector<std::int64_t>& prefix : prompts) {
        const torch::Tensor input = to_tensor(prefix, device);
        row_logits.push_back(model.logits(input, torch::arange(input.size(1), input.options()).unsqueeze(0),
                                          [](std::size_t, const auto&... qkv) { return causal_attention(qkv...); }));
      }
      logits.push_back(torch::cat(row_logits));
      tokens.push_back(logits.back().argmax(-1));
      const torch::Tensor on_host = tokens.back().cpu();
      for (std::size_t row = 0; row < prompts.size(); ++row) {
        prompts[row].push_back(on_host[static_cast<std::int64_t>(row)].item<std::int64_t>());
      }
    }
  });
  result.tokens = torch::stack(tokens);
  result.logits = torch::stack(logits);
  return result;
}

// The state that a decode step reads and advances, all of it on the device and at fixed addresses.
struct Decoder {
  const Model& model;
  Cache& cache;
  torch::Tensor rows;      // int64 [rows]: 0, 1, 2, ...
  torch::Tensor tokens;    // int64 [rows], the newest token of each row, not in the cache yet
  torch::Tensor positions; // int64 [rows], how many are
  torch::Tensor logits;    // float32 [rows, vocabulary], of the last step

  void step() {
    const torch::Tensor lengths = positions + 1; // the new key takes part
    const auto attend = [&](std::size_t layer, const torch::Tensor& query, const torch::Tensor& key,
                            const torch::Tensor& value) {
      cache.store(layer, rows, positions, key.squeeze(1), value.squeeze(1));
      single_query::AttentionOptions options;
      options.lengths = lengths;
      options.page_table = cache.page_table();
      // query [rows, 1, Hq, D]; the cache [.., slots, Hkv, D] is passed as it lies, with its axes named in order.
      return single_query::attention(query.transpose(1, 2), cache.layer(layer).key.transpose(1, 2),
                                     cache.layer(layer).value.transpose(1, 2), options)
          .transpose(1, 2);
    };
    logits.copy_(model.logits(tokens.unsqueeze(1), positions.unsqueeze(1), attend));
    tokens.copy_(logits.argmax(-1));
    positions.add_(1);
  }
};

// Fills the cache with all but the last token of each prompt; that one is the first input of the decode steps.
void prefill(const Model& model, Cache& cache, const Prompts& prompts, torch::Device device) {
  for (std::size_t row = 0; row < prompts.size(); ++row) {
    const torch::Tensor input = to_tensor(prompts[row], device).slice(1, 0, -1);
    if (input.size(1) == 0) {
      continue;
    }
    const torch::Tensor positions = torch::arange(input.size(1), input.options());
    for (std::int64_t position = 0; position < input.size(1); ++position) {
      cache.reserve(static_cast<std::int64_t>(row), position);
    }
    const torch::Tensor row_of_each = torch::full_like(positions, static_cast<std::int64_t>(row));
    model.logits(
        input, positions.unsqueeze(0),
        [&](std::size_t layer, const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value) {
          cache.store(layer, row_of_each, positions, key[0], value[0]);
          return causal_attention(query, key, value);
        });
  }
}

Generated generate_with_cache(const Model& model, const Prompts& prompts, bool paged, torch::Device device) {
  const auto rows = static_cast<std::int64_t>(prompts.size());
  Cache cache(model.shape(), rows, paged, device);
  prefill(model, cache, prompts, device);
  std::vector<std::int64_t> last_tokens, positions; // the host's copy of what it knows without asking the device
  for (const std::vector<std::int64_t>& prompt : prompts) {
    last_tokens.push_back(prompt.back());
    positions.push_back(static_cast<std::int64_t>(prompt.size()) - 1);
  }
  Decoder decoder{model,
                  cache,
                  torch::arange(rows, torch::dtype(torch::kLong).device(device)),
                  to_tensor(last_tokens, device)[0],
                  to_tensor(positions, device)[0],
                  torch::empty({rows, vocabulary}, device)};
  const auto reserve = [&] {
    for (std::size_t row = 0; row < prompts.size(); ++row) {
      cache.reserve(static_cast<std::int64_t>(row), positions[row]++);
    }
  };

  // The first step runs eagerly, which also initialises what LibTorch initialises on first use; then one capture.
  Generated result;
  std::vector<torch::Tensor> tokens, logits;
  const auto keep = [&] {
    tokens.push_back(decoder.tokens.clone());
    logits.push_back(decoder.logits.clone());
  };
  reserve();
  decoder.step();
  keep();
  std::optional<at::cuda::CUDAGraph> graph;
  if (device.is_cuda()) {
    graph.emplace();
    graph->capture_begin();
    decoder.step();
    graph->capture_end();
  }
  result.seconds = seconds_of(device, [&] {
    for (std::int64_t step = 1; step < steps; ++step) {
      reserve();
      if (graph) {
        graph->replay();
      } else {
        decoder.step();
      }
      keep();
    }
  });
  result.tokens = torch::stack(tokens);
  result.logits = torch::stack(logits);
  return result;
}

// Logits are sums of some thousand float32 terms through all layers, in another order than the reference's: they differ
// by rounding, 2^-24 of the largest at a time. A thousand times that is allowed; a key, position or head that is wrong
// moves them by ten thousand times as much again. Tokens have to be equal.
bool equal(const Generated& generated, const Generated& expected) {
  const double allowed = 1000 * std::ldexp(expected.logits.abs().max().item<double>(), -24);
  const double error = (generated.logits - expected.logits).abs().max().item<double>();
  const bool same_tokens = generated.tokens.equal(expected.tokens);
  std::cout << "    tokens " << (same_tokens ? "equal" : "DIFFERENT") << ", largest difference of a logit " << error
            << " (allowed " << allowed << ")\n";
  return same_tokens && error <= allowed; // false for NaN
}

bool generate(torch::Device device) {
  const torch::InferenceMode inference;
  c10::cuda::OptionalCUDAStreamGuard stream;
  if (device.is_cuda()) { // a capture needs a stream that is not the default one
    stream.reset_stream(c10::cuda::getStreamFromPool());
  }
  torch::manual_seed(0);
  const Model model(ModelShape{}, device);
  Prompts prompts;
  for (const std::int64_t length : {1, 15, 40}) {
    const torch::Tensor tokens = torch::randint(vocabulary, {length}, torch::kLong);
    prompts.emplace_back(tokens.const_data_ptr<std::int64_t>(), tokens.const_data_ptr<std::int64_t>() + length);
  }
  const auto report = [&](const std::string& name, const Generated& generated, std::int64_t timed_steps) {
    std::cout << name << ": "
              << static_cast<double>(timed_steps) * static_cast<double>(prompts.size()) / generated.seconds
              << " tokens per second\n";
  };
  const Generated expected = generate_without_cache(model, prompts, device);
  report("scaled_dot_product_attention, whole prefix", expected, steps);
  bool all_equal = true;
  for (const bool paged : {false, true}) {
    const Generated generated = generate_with_cache(model, prompts, paged, device);
    report(std::string("single_query, ") + (paged ? "paged" : "contiguous") + " cache", generated, steps - 1);
    all_equal = equal(generated, expected) && all_equal;
  }
  return all_equal;
}

} // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--help") {
      std::cout << "usage: single_query_generate [--device=auto|cpu|cuda]\n"
                   "Generates text with a small random transformer through single_query and checks it.\n";
      return 0;
    }
  }
  try {
    const bool parsed = c10::ParseCommandLineFlags(&argc, &argv) && argc == 1;
    TORCH_CHECK(parsed && (FLAGS_device == "auto" || FLAGS_device == "cpu" || FLAGS_device == "cuda"),
                "usage: single_query_generate [--device=auto|cpu|cuda]");
    const bool cuda = FLAGS_device == "cuda" || (FLAGS_device == "auto" && torch::cuda::is_available());
    TORCH_CHECK(!cuda || torch::cuda::is_available(), "there is no CUDA device");
    return generate(cuda ? torch::kCUDA : torch::kCPU) ? 0 : 1;
  } catch (const c10::Error& error) {
    std::cerr << "single_query_generate: " << error.what_without_backtrace() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "single_query_generate: " << error.what() << "\n";
    return 2;
  }
}
