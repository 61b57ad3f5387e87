// A small decoder-only transformer with random weights: RMSNorm, rotary positions, grouped-query attention, gated MLP.
// How attention is computed is the caller's business, so that two ways can be compared.
#pragma once

#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <vector>

struct ModelShape {
  std::int64_t layers = 3;
  std::int64_t query_heads = 6;
  std::int64_t kv_heads = 2;
  std::int64_t head_dim = 48;
  std::int64_t hidden = 256;
  std::int64_t mlp = 512;
  std::int64_t vocabulary = 512;
};

class Model {
public:
  // float32, so that a comparison of two ways is sharp: in 16 bits both may be right and still pick different tokens.
  Model(const ModelShape& shape, torch::Device device) : shape_(shape) {
    const auto random = [&](std::int64_t in, std::int64_t out) { // [in, out], keeps the variance of its input
      return torch::randn({in, out}, device) / std::sqrt(static_cast<double>(in));
    };
    embedding_ = torch::randn({shape.vocabulary, shape.hidden}, device);
    head_ = random(shape.hidden, shape.vocabulary);
    frequencies_ =
        torch::pow(10000.0, -torch::arange(0, shape.head_dim, 2, device) / static_cast<double>(shape.head_dim));
    for (std::int64_t i = 0; i < shape.layers; ++i) {
      const std::int64_t kv = shape.kv_heads * shape.head_dim;
      const std::int64_t queries = shape.query_heads * shape.head_dim;
      layers_.push_back({random(shape.hidden, queries), random(shape.hidden, kv), random(shape.hidden, kv),
                         random(queries, shape.hidden), random(shape.hidden, shape.mlp),
                         random(shape.hidden, shape.mlp), random(shape.mlp, shape.hidden)});
    }
  }

  const ModelShape& shape() const { return shape_; }

  // tokens, positions: int64 [B, T]. Returns the logits of each row's last token, [B, vocabulary].
  // attend(layer, query [B, T, Hq, D], key, value [B, T, Hkv, D]) returns the attention output, [B, T, Hq, D].
  template <typename Attend>
  torch::Tensor logits(const torch::Tensor& tokens, const torch::Tensor& positions, const Attend& attend) const {
    const auto heads = [&](const torch::Tensor& x, std::int64_t count) { // [B, T, count * D] -> [B, T, count, D]
      return x.view({x.size(0), x.size(1), count, shape_.head_dim});
    };
    torch::Tensor x = torch::embedding(embedding_, tokens); // [B, T, hidden]
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const torch::Tensor normed = normalised(x);
      const torch::Tensor query = rotated(heads(normed.matmul(layer.query), shape_.query_heads), positions);
      const torch::Tensor key = rotated(heads(normed.matmul(layer.key), shape_.kv_heads), positions);
      const torch::Tensor value = heads(normed.matmul(layer.value), shape_.kv_heads);
      x = x + attend(i, query, key, value).flatten(2).matmul(layer.output);
      const torch::Tensor inner = normalised(x);
      x = x + (torch::silu(inner.matmul(layer.gate)) * inner.matmul(layer.up)).matmul(layer.down);
    }
    return normalised(x.select(1, -1)).matmul(head_);
  }

private:
  struct Layer {
    torch::Tensor query, key, value, output, gate, up, down; // [in, out]
  };

  torch::Tensor normalised(const torch::Tensor& x) const { return torch::rms_norm(x, {shape_.hidden}); }

  // Turns the pair (d, d + D / 2) of each head by position * frequency[d].
  torch::Tensor rotated(const torch::Tensor& x, const torch::Tensor& positions) const {
    const torch::Tensor angle = (positions.unsqueeze(-1) * frequencies_).unsqueeze(2); // [B, T, 1, D / 2]
    const std::vector<torch::Tensor> half = x.chunk(2, -1);
    const torch::Tensor cosine = angle.cos();
    const torch::Tensor sine = angle.sin();
    return torch::cat({half[0] * cosine - half[1] * sine, half[0] * sine + half[1] * cosine}, -1);
  }

  ModelShape shape_;
  torch::Tensor embedding_; // [vocabulary, hidden]
  torch::Tensor head_;      // [hidden, vocabulary]
  torch::Tensor frequencies_;
  std::vector<Layer> layers_;
};
