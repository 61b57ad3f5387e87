// single_query: attention of one query per head against N keys and values.
//
//     out = softmax(scale * q K^T) V        (the decode step of a transformer)
//
// This header is the whole raw interface: plain pointers, sizes and strides in, results out. Strides count elements,
// not bytes, and are not negative; that of an axis of one index may be any size. The last axis (head_dim) of every
// tensor is contiguous. The library never allocates, synchronises, prints or exits; all scratch memory is the caller's.
//
// Every function throws single_query::Error and nothing else. An argument is refused before anything is launched or
// written, with a message that names the argument, the value it had and what is allowed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

namespace single_query {

class Error : public std::runtime_error {
public:
  enum class Kind {
    invalid_argument, // the call is wrong: the message names the argument
    cuda              // CUDA refused or failed: the message carries cudaGetErrorName
  };
  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  Kind kind() const noexcept { return kind_; }

private:
  Kind kind_;
};

enum class DataType : std::int32_t { float32, float16, bfloat16 };
enum class MaskType : std::int32_t { boolean, float32, float16, bfloat16 };
enum class LengthType : std::int32_t { int32, int64 };

constexpr std::int64_t max_head_dim = 256;

// One attention problem. A field whose pointer is null, or that keeps its default, takes no part.
//
// Query head h reads key/value head h / (query_heads / kv_heads). For each query head, in this order:
//     score[n]  = scale * dot(query, key[n])
//     score[n]  = softcap * tanh(score[n] / softcap)               where softcap > 0
//     score[n] += alibi_slopes[b, h] * (n - (length[b] - 1))
//     score[n] += attn_mask[b, h, n]
//     output    = sum_n exp(score[n]) value[n] / (sum_n exp(score[n]) + exp(sinks[h]))
//     lse       = log(sum_n exp(score[n]) + exp(sinks[h]))         natural logarithm
// over the keys n < length[b] that neither window nor attn_mask excludes. An excluded key takes no part at all: its
// slots may hold NaN. Where no key remains, output is 0 and lse is -inf (or the sink). Arithmetic is float32.
struct AttentionProblem {
  // Element type of query, key, value and output.
  DataType dtype = DataType::float32;

  std::int64_t batch = 1;
  std::int64_t query_heads = 1; // a multiple of kv_heads
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 0; // 1 .. 256

  // query, output: [batch, query_heads, head_dim]; output may overlap neither an input nor itself.
  const void* query = nullptr;
  std::int64_t query_stride_batch = 0;
  std::int64_t query_stride_head = 0;
  void* output = nullptr;
  std::int64_t output_stride_batch = 0;
  std::int64_t output_stride_head = 0;

  // lse: float32 [batch, query_heads]; null: not wanted.
  float* lse = nullptr;
  std::int64_t lse_stride_batch = 0;
  std::int64_t lse_stride_head = 0;

  // The cache: key, value [pages, kv_heads, page_size, head_dim], each with strides of its own (0 is allowed).
  // Row b's key n lies in slot n % page_size of page page_table[b, n / page_size].
  // A contiguous cache [batch, kv_heads, N, head_dim] is one page per row: pages = batch, page_size = N and no
  // page_table, so that row b reads page b. N is 0 .. 2^31 - 1.
  const void* key = nullptr;
  std::int64_t key_stride_page = 0;
  std::int64_t key_stride_head = 0;
  std::int64_t key_stride_slot = 0;
  const void* value = nullptr;
  std::int64_t value_stride_page = 0;
  std::int64_t value_stride_head = 0;
  std::int64_t value_stride_slot = 0;
  std::int64_t pages = 1;
  std::int64_t page_size = 0;

  // page_table: int32 [batch, max_pages], needs lengths. Entries that no key of the row needs are never read. A needed
  // entry outside [0, pages) touches no memory: that row's output and lse are NaN.
  const std::int32_t* page_table = nullptr;
  std::int64_t page_table_stride_batch = 0;
  std::int64_t page_table_stride_page = 0;
  std::int64_t max_pages = 1;

  // lengths: [batch], where the data is; row b has the keys 0 .. lengths[b] - 1. Read when the kernel runs and clamped
  // to [0, max_pages * page_size]. Null: every row has max_pages * page_size keys.
  const void* lengths = nullptr;
  LengthType lengths_type = LengthType::int32;
  std::int64_t lengths_stride = 1;

  // A finite number; the usual one is 1 / sqrt(head_dim). There is no default: NaN is refused.
  float scale = std::numeric_limits<float>::quiet_NaN();

  std::int64_t window = 0; // only the newest `window` keys take part; 0: all of them
  float softcap = 0;       // 0: off

  // alibi_slopes: float32 [batch, query_heads] (stride 0 over batch for one set of slopes).
  const float* alibi_slopes = nullptr;
  std::int64_t alibi_stride_batch = 0;
  std::int64_t alibi_stride_head = 1;

  // attn_mask: [batch, query_heads, max_pages * page_size], any axis may have stride 0. boolean (one byte): nonzero
  // takes part; a floating type is added, and -inf excludes the key.
  const void* attn_mask = nullptr;
  MaskType mask_type = MaskType::boolean;
  std::int64_t mask_stride_batch = 0;
  std::int64_t mask_stride_head = 0;
  std::int64_t mask_stride_key = 1;

  // sinks: float32 [query_heads], a score without a key.
  const float* sinks = nullptr;
  std::int64_t sinks_stride = 1;

  // Keys per split; 0: the library chooses. Given, a row's result is bit for bit the same whatever the batch, its
  // neighbours and the capacity are.
  std::int64_t split_size = 0;
};

// The problem of dense row-major tensors: query [batch, query_heads, head_dim], key and value
// [batch, kv_heads, keys, head_dim], with scale 1 / sqrt(head_dim). The pointers are still to be set.
AttentionProblem contiguous_problem(DataType dtype, std::int64_t batch, std::int64_t query_heads,
                                    std::int64_t kv_heads, std::int64_t keys, std::int64_t head_dim);

// Attention on the current CUDA device, one kernel launch on `stream`.
//
// workspace: attention_workspace_bytes(problem) bytes of device memory, aligned to 256 bytes, filled with zeros once
// when it is allocated. Every call leaves it ready for the next one, whatever that one's problem is, if it is large
// enough. One workspace serves one stream at a time.
std::size_t attention_workspace_bytes(const AttentionProblem& problem);
void attention(const AttentionProblem& problem, void* workspace, std::size_t workspace_bytes, cudaStream_t stream);

// How the host twins share their work out: call body(begin, end) over disjoint ranges that cover [0, tasks), on any
// threads, and return when all are done. Empty: one serial call. Results do not depend on it.
using ParallelFor =
    std::function<void(std::int64_t tasks, const std::function<void(std::int64_t begin, std::int64_t end)>& body)>;

// The same contract on host memory. workspace: attention_on_host_workspace_bytes(problem) bytes of host memory,
// aligned to 64 bytes, content irrelevant.
std::size_t attention_on_host_workspace_bytes(const AttentionProblem& problem);
void attention_on_host(const AttentionProblem& problem, void* workspace, std::size_t workspace_bytes,
                       const ParallelFor& parallel_for = {});

// Attention over the union of disjoint sets of keys, from the output and lse of each: with weights
// softmax_p(lse[p]), output = sum_p weight[p] outputs[p] and output_lse = log sum_p exp(lse[p]).
// A part whose lse is -inf counts nothing, whatever its output holds; where all are, output is 0 and lse -inf.
struct MergeProblem {
  DataType dtype = DataType::float32; // of outputs and output
  std::int64_t parts = 0;
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t head_dim = 0; // 1 .. 256

  // outputs: [parts, batch, heads, head_dim]; lse: float32 [parts, batch, heads].
  const void* outputs = nullptr;
  std::int64_t outputs_stride_part = 0;
  std::int64_t outputs_stride_batch = 0;
  std::int64_t outputs_stride_head = 0;
  const float* lse = nullptr;
  std::int64_t lse_stride_part = 0;
  std::int64_t lse_stride_batch = 0;
  std::int64_t lse_stride_head = 0;

  // output: [batch, heads, head_dim]; output_lse: float32 [batch, heads] (null: not wanted).
  void* output = nullptr;
  std::int64_t output_stride_batch = 0;
  std::int64_t output_stride_head = 0;
  float* output_lse = nullptr;
  std::int64_t output_lse_stride_batch = 0;
  std::int64_t output_lse_stride_head = 0;
};

// One kernel launch on `stream`, on the current CUDA device; needs no workspace.
void merge(const MergeProblem& problem, cudaStream_t stream);
void merge_on_host(const MergeProblem& problem, const ParallelFor& parallel_for = {});

} // namespace single_query
