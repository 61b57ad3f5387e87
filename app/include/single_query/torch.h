// single_query over LibTorch tensors: attention of one query per head against N keys and values.
//
//     at::Tensor output = single_query::attention(query, key, value);
//
// The same functions are registered as torch.ops.single_query.attention, attention.out, attention_with_lse and merge,
// for CUDA, CPU and Meta (fake) tensors. <single_query/attention.h> states the mathematics in the comment of
// AttentionProblem, and what holds whatever the input: which keys take part, NaN, infinity, rows without a key.
//
// On CUDA the work goes to the current stream of the query's device, current or not, and nothing is synchronised.
// Every call may be captured in a CUDA graph, which may be replayed after the contents of any input changed; the graph
// owns its scratch memory, while the tensors it was captured with have to live as long as it is replayed. Results are
// the same bits from run to run. Any number of host threads may call at once.
//
// Inference only. Every argument is checked before anything is launched or written: a bad one throws c10::Error
// (RuntimeError in Python) with a message that names it, its value and what is allowed. Nothing is copied, converted or
// moved to another device to make it fit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace single_query {

// What may come with query, key and value. B: batch, Hq: query heads, Hkv: key/value heads, N: keys allocated per row,
// D: head_dim. Tensors lie on the query's device and may have any strides, 0 (expanded) included.
struct AttentionOptions {
  // bool (True takes part), or the query's dtype or float32 (added to the score; -inf excludes the key as False does).
  // Broadcastable to [B, Hq, N], or with four axes to [B, Hq, 1, N]. Under paging N is max_pages * page_size.
  std::optional<at::Tensor> attn_mask;

  // Any finite number, negative and 0 too. Default: 1 / sqrt(D).
  std::optional<double> scale;

  // int32 or int64 [B]: row b has the keys 0 .. lengths[b] - 1. Read on the device when the kernel runs, and clamped
  // to [0, N]. Default: N for every row.
  std::optional<at::Tensor> lengths;

  // int32 [B, max_pages], needs lengths and a query of 3 or 4 axes. key and value are then page pools
  // [P, Hkv, page_size, D] of any page size (a cache [P, page_size, Hkv, D] is passed as .transpose(1, 2)), and key n
  // of row b is slot n % page_size of page page_table[b, n / page_size]. Entries that no key needs are never read; a
  // needed one outside [0, P) touches no memory and makes that row's output and lse NaN.
  std::optional<at::Tensor> page_table;

  // 1 or more: only the newest `window` keys of a row take part. Default: all.
  std::optional<std::int64_t> window;

  // Scores become softcap * tanh(score / softcap). Finite and not negative; 0 is off.
  double softcap = 0.0;

  // float32 [Hq] or [B, Hq]: alibi_slopes[h] * (n - (length - 1)) is added to the score of key n.
  std::optional<at::Tensor> alibi_slopes;

  // float32 [Hq]: exp(sinks[h]) is added to the denominator of the softmax.
  std::optional<at::Tensor> sinks;

  // 1 or more: keys per split. A row's bits then do not depend on B, on its neighbours or on N. Default: chosen by
  // the library.
  std::optional<std::int64_t> split_size;
};

// softmax(scale * query key^T) value.
//
// query: [B, Hq, D], [B, Hq, 1, D] (as scaled_dot_product_attention has it), [Hq, D] or [D]; float32, float16 or
//   bfloat16; 1 <= D <= 256; Hq a multiple of Hkv: query head h reads key/value head h / (Hq / Hkv).
// key, value: [B, Hkv, N, D] for a query of 3 or 4 axes, [Hkv, N, D] for 2, [N, D] for 1; the query's dtype and device.
// All three: any strides, but the last axis contiguous. No input may require grad while grad mode is on.
// Returns a dense tensor of the query's shape and dtype.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options = {});

// attention() into `out`, and returns it. out: the query's shape, dtype and device, any strides with a contiguous last
// axis; it may overlap neither an input nor itself.
at::Tensor& attention_out(at::Tensor& out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const AttentionOptions& options = {});

// attention(), and the logarithm of the softmax's denominator.
// Returns (output, lse); lse: float32, the query's shape without D; natural logarithm; -inf where no key takes part.
std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const AttentionOptions& options = {});

// Attention over the union of P disjoint sets of keys, from attention_with_lse() over each.
//
// outputs: [P, ..., D], P parts of at least 1, float32, float16 or bfloat16, the last axis contiguous.
// lse: float32 [P, ...] on the same device. The axes between (their leading ones and the last one each) must be
//   describable with two strides, which every contiguous tensor's are.
// A part whose lse is -inf counts nothing, whatever its output holds. Returns (output [..., D], lse [...]).
std::tuple<at::Tensor, at::Tensor> merge(const at::Tensor& outputs, const at::Tensor& lse);

} // namespace single_query
