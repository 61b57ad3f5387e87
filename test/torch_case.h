// Random tensors, LibTorch's own answer in double, and what the tests of the LibTorch layer compare with.
#pragma once

// LibTorch has a CHECK of its own that compiles to nothing where Catch2's is meant. Theirs first, then ours.
#ifdef TEST_CASE
#error "torch_case.h has to be included before Catch2"
#endif
#include "single_query/torch.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/types.h>
#undef CHECK

#include "each_device.h"

#include <cmath>
#include <string>
#include <vector>

namespace single_query::test {

inline at::Device torch_device(Device device) {
  return device == Device::cuda ? at::kCUDA : at::kCPU;
}

// Shapes: query [B, Hq, D], key and value [B, Hkv, N, D].
struct TensorCase {
  std::int64_t batch = 2;
  std::int64_t query_heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t keys = 37;
  std::int64_t head_dim = 24;
  at::ScalarType dtype = at::kFloat;
};

struct Tensors {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

inline Tensors random_tensors(const TensorCase& c, at::Device device) {
  torch::manual_seed(1);
  const auto random = [&](at::IntArrayRef sizes) { return torch::randn(sizes).to(device, c.dtype); };
  return {random({c.batch, c.query_heads, c.head_dim}), random({c.batch, c.kv_heads, c.keys, c.head_dim}),
          random({c.batch, c.kv_heads, c.keys, c.head_dim})};
}

// Attention in double by LibTorch's own operators, for a contiguous cache: (output [B, Hq, D], lse [B, Hq]).
inline std::tuple<at::Tensor, at::Tensor> expected_attention(const Tensors& tensors, const AttentionOptions& options) {
  const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kCPU, at::kDouble); };
  const at::Tensor query = wide(tensors.query);
  const std::int64_t heads = query.size(1), keys = tensors.key.size(2), group = heads / tensors.key.size(1);
  const at::Tensor key = wide(tensors.key).repeat_interleave(group, 1);
  const at::Tensor value = wide(tensors.value).repeat_interleave(group, 1);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  at::Tensor score = (torch::matmul(key, query.unsqueeze(-1)) * scale).squeeze(-1); // [B, Hq, N]
  if (options.softcap != 0) {
    score = options.softcap * torch::tanh(score / options.softcap);
  }
  const at::Tensor positions = torch::arange(keys, at::kLong);
  const at::Tensor lengths = options.lengths ? options.lengths->to(at::kCPU, at::kLong).clamp(0, keys).view({-1, 1, 1})
                                             : torch::full({1, 1, 1}, keys, at::kLong);
  if (options.alibi_slopes) {
    score = score + wide(*options.alibi_slopes).unsqueeze(-1) * (positions - (lengths - 1));
  }
  at::Tensor excluded = positions >= lengths; // [B, 1, N]
  if (options.window) {
    excluded = excluded | (positions < lengths - *options.window);
  }
  if (options.attn_mask) {
    const at::Tensor mask = options.attn_mask->to(at::kCPU);
    if (mask.scalar_type() == at::kBool) {
      excluded = excluded | ~mask;
    } else {
      score = score + wide(mask);
    }
  }
  score = score.masked_fill(excluded, -INFINITY);
  const at::Tensor sink = options.sinks ? wide(*options.sinks).view({1, heads, 1}).expand({query.size(0), heads, 1})
                                        : torch::full({query.size(0), heads, 1}, -INFINITY, at::kDouble);
  const at::Tensor lse = torch::logsumexp(torch::cat({score, sink}, -1), -1, true); // [B, Hq, 1]
  const at::Tensor weights = (score - lse.masked_fill(lse == -INFINITY, 0)).exp();  // [B, Hq, N]
  return {torch::matmul(weights.unsqueeze(-2), value).squeeze(-2), lse.squeeze(-1)};
}

// The values are about 1: rounding of the result and of the weights, and of some hundred float32 operations.
inline bool close(const at::Tensor& actual, const at::Tensor& expected) {
  const double unit = actual.scalar_type() == at::kFloat  ? std::ldexp(1.0, -24)
                      : actual.scalar_type() == at::kHalf ? std::ldexp(1.0, -11)
                                                          : std::ldexp(1.0, -8);
  return torch::allclose(actual.to(at::kCPU, at::kDouble), expected.to(at::kCPU, at::kDouble), 2 * unit,
                         std::max(2 * unit, std::ldexp(100.0, -24)));
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto bits = [](const at::Tensor& tensor) {
    return tensor.contiguous().view(tensor.element_size() == 4 ? at::kInt : at::kShort);
  };
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && torch::equal(bits(a), bits(b));
}

// The message of the c10::Error that `call` throws; empty if it throws none.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

// A tensor with the values of `tensor` and other strides, offset and gaps, which hold NaN: axes are laid out in the
// order given, each with `gap` elements more than it needs, `offset` elements into the storage.
inline at::Tensor laid_out(const at::Tensor& tensor, at::IntArrayRef order, std::int64_t gap, std::int64_t offset) {
  std::vector<std::int64_t> strides(static_cast<std::size_t>(tensor.dim()));
  std::int64_t elements = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::int64_t axis = order[i];
    strides[static_cast<std::size_t>(axis)] = elements;
    elements = elements * tensor.size(axis) + gap;
  }
  at::Tensor storage = torch::full({elements + offset}, std::nan(""), tensor.options());
  at::Tensor view = storage.as_strided(tensor.sizes(), strides, offset);
  view.copy_(tensor);
  return view;
}

} // namespace single_query::test
