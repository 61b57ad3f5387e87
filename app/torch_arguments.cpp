#include "torch_arguments.h"

#include "torch_checks.h"

#include <cmath>

namespace single_query {
namespace {

// An optional argument that was given: defined, and on the query's device.
bool is_given(const char* name, const std::optional<at::Tensor>& tensor, const at::Tensor& query) {
  if (!tensor.has_value()) {
    return false;
  }
  check_defined(name, *tensor);
  check_same_device(name, *tensor, "query", query);
  return true;
}

// Which axis of the query is which; -1: it has none. [D], [Hq, D], [B, Hq, D] or [B, Hq, 1, D].
struct QueryAxes {
  explicit QueryAxes(const at::Tensor& query)
      : batch(query.dim() >= 3 ? 0 : -1), head(query.dim() >= 3   ? 1
                                               : query.dim() == 2 ? 0
                                                                  : -1) {}
  std::int64_t batch;
  std::int64_t head;
};

std::int64_t size_or_one(const at::Tensor& tensor, std::int64_t axis) {
  return axis < 0 ? 1 : axis_size(tensor, axis);
}

std::int64_t stride_or_zero(const at::Tensor& tensor, std::int64_t axis) {
  return axis < 0 ? 0 : axis_stride(tensor, axis);
}

// Keys or values [page, kv_head, slot, D], less the leading axes where the query has them not either.
struct CacheStrides {
  explicit CacheStrides(const at::Tensor& cache)
      : page(stride_or_zero(cache, cache.dim() - 4)), head(stride_or_zero(cache, cache.dim() - 3)),
        slot(axis_stride(cache, cache.dim() - 2)) {}
  std::int64_t page;
  std::int64_t head;
  std::int64_t slot;
};

void set_query(AttentionProblem& problem, const at::Tensor& query) {
  const QueryAxes axes(query);
  TORCH_CHECK(query.dim() != 4 || axis_size(query, 2) == 1, "query has ", axis_size(query, 2),
              " positions in axis 2 of [B, Hq, 1, D]: it must have 1");
  check_last_axis_contiguous("query", query);
  problem.dtype = data_type(query.scalar_type());
  problem.batch = size_or_one(query, axes.batch);
  problem.query_heads = size_or_one(query, axes.head);
  problem.head_dim = axis_size(query, query.dim() - 1);
  problem.query_stride_batch = stride_or_zero(query, axes.batch);
  problem.query_stride_head = stride_or_zero(query, axes.head);
}

void set_cache(AttentionProblem& problem, const at::Tensor& key, const at::Tensor& value, bool paged) {
  TORCH_CHECK(axis_size(key, key.dim() - 1) == problem.head_dim, "key has head_dim ", axis_size(key, key.dim() - 1),
              ": it must be the query's, ", problem.head_dim);
  TORCH_CHECK(paged || key.dim() < 4 || axis_size(key, 0) == problem.batch, "key has batch ", axis_size(key, 0),
              ": it must be the query's, ", problem.batch);
  TORCH_CHECK(value.sizes() == key.sizes(), "value has shape ", value.sizes(), ": it must be the key's, ", key.sizes());
  check_last_axis_contiguous("key", key);
  check_last_axis_contiguous("value", value);
  problem.pages = size_or_one(key, key.dim() - 4);
  problem.kv_heads = size_or_one(key, key.dim() - 3);
  problem.page_size = axis_size(key, key.dim() - 2);
  const CacheStrides key_strides(key);
  problem.key_stride_page = key_strides.page;
  problem.key_stride_head = key_strides.head;
  problem.key_stride_slot = key_strides.slot;
  const CacheStrides value_strides(value);
  problem.value_stride_page = value_strides.page;
  problem.value_stride_head = value_strides.head;
  problem.value_stride_slot = value_strides.slot;
}

void set_page_table(AttentionProblem& problem, const at::Tensor& page_table) {
  TORCH_CHECK(axis_size(page_table, 0) == problem.batch, "page_table has ", axis_size(page_table, 0),
              " rows: it must have the query's batch, ", problem.batch);
  problem.max_pages = axis_size(page_table, 1);
  problem.page_table_stride_batch = axis_stride(page_table, 0);
  problem.page_table_stride_page = axis_stride(page_table, 1);
}

void set_lengths(AttentionProblem& problem, const at::Tensor& lengths) {
  TORCH_CHECK(axis_size(lengths, 0) == problem.batch, "lengths has ", axis_size(lengths, 0),
              " elements: it must have the query's batch, ", problem.batch);
  problem.lengths_type = lengths.scalar_type() == at::kLong ? LengthType::int64 : LengthType::int32;
  problem.lengths_stride = axis_stride(lengths, 0);
}

// The mask's axis that is `from_end` axes before its last one, broadcast to `size`. Returns its stride.
std::int64_t broadcast_stride(const at::Tensor& mask, std::int64_t from_end, std::int64_t size, const char* what) {
  const std::int64_t axis = mask.dim() - 1 - from_end;
  if (axis < 0) {
    return 0;
  }
  TORCH_CHECK(axis_size(mask, axis) == size || axis_size(mask, axis) == 1, "attn_mask has shape ", mask.sizes(),
              ": its axis ", axis, " must have size 1 or ", size, " (", what, ")");
  return axis_size(mask, axis) == size ? axis_stride(mask, axis) : 0;
}

void set_mask(AttentionProblem& problem, const at::Tensor& mask) {
  const bool with_query_axis = mask.dim() == 4;
  TORCH_CHECK(!with_query_axis || axis_size(mask, 2) == 1, "attn_mask has shape ", mask.sizes(),
              ": axis 2 of [B, Hq, 1, N] must have size 1");
  const std::int64_t skip = with_query_axis ? 1 : 0;
  switch (mask.scalar_type()) {
  case at::kBool:
    problem.mask_type = MaskType::boolean;
    break;
  case at::kHalf:
    problem.mask_type = MaskType::float16;
    break;
  case at::kBFloat16:
    problem.mask_type = MaskType::bfloat16;
    break;
  default:
    problem.mask_type = MaskType::float32;
  }
  problem.mask_stride_key = broadcast_stride(mask, 0, problem.max_pages * problem.page_size, "keys");
  problem.mask_stride_head = broadcast_stride(mask, 1 + skip, problem.query_heads, "query heads");
  problem.mask_stride_batch = broadcast_stride(mask, 2 + skip, problem.batch, "batch");
}

void set_alibi_slopes(AttentionProblem& problem, const at::Tensor& slopes) {
  const bool per_row = slopes.dim() == 2;
  TORCH_CHECK(axis_size(slopes, slopes.dim() - 1) == problem.query_heads &&
                  (!per_row || axis_size(slopes, 0) == problem.batch),
              "alibi_slopes has shape ", slopes.sizes(), ": it must be [", problem.query_heads, "] or [", problem.batch,
              ", ", problem.query_heads, "]");
  problem.alibi_stride_batch = per_row ? axis_stride(slopes, 0) : 0;
  problem.alibi_stride_head = axis_stride(slopes, slopes.dim() - 1);
}

void set_sinks(AttentionProblem& problem, const at::Tensor& sinks) {
  TORCH_CHECK(axis_size(sinks, 0) == problem.query_heads, "sinks has ", axis_size(sinks, 0),
              " elements: it must have one per query head, ", problem.query_heads);
  problem.sinks_stride = axis_stride(sinks, 0);
}

// A number that has to survive the way into float32.
float float_argument(const char* name, double value) {
  const auto narrowed = static_cast<float>(value);
  TORCH_CHECK(std::isfinite(narrowed), name, " is ", value, ": it must be finite in float32");
  return narrowed;
}

// An optional count. The raw interface's 0 means absent, which a given 0 must not.
std::int64_t count_argument(const char* name, const std::optional<std::int64_t>& value) {
  TORCH_CHECK(!value || *value >= 1, name, " is ", *value, ": it must be 1 or more, or be left out");
  return value.value_or(0);
}

void set_numbers(AttentionProblem& problem, const AttentionOptions& options) {
  // head_dim 0 is refused by the raw interface; its scale must not be refused before.
  problem.scale = options.scale ? float_argument("scale", *options.scale)
                                : 1.0f / std::sqrt(static_cast<float>(problem.head_dim > 0 ? problem.head_dim : 1));
  problem.softcap = float_argument("softcap", options.softcap);
  TORCH_CHECK(problem.softcap != 0 || options.softcap == 0, "softcap is ", options.softcap,
              ": it must be 0 or a number that float32 can tell from 0");
  problem.window = count_argument("window", options.window);
  problem.split_size = count_argument("split_size", options.split_size);
}

template <typename Pointer>
void set_pointer(Pointer& pointer, const std::optional<at::Tensor>& tensor) {
  if (tensor) {
    pointer = static_cast<Pointer>(address(*tensor));
  }
}

void set_pointers(AttentionProblem& problem, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options) {
  problem.query = address(query);
  problem.key = address(key);
  problem.value = address(value);
  set_pointer(problem.attn_mask, options.attn_mask);
  set_pointer(problem.lengths, options.lengths);
  set_pointer(problem.page_table, options.page_table);
  set_pointer(problem.alibi_slopes, options.alibi_slopes);
  set_pointer(problem.sinks, options.sinks);
}

} // namespace

void check_attention_types(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options) {
  check_defined("query", query);
  check_defined("key", key);
  check_defined("value", value);
  check_floating("query", query);
  TORCH_CHECK(query.dim() >= 1 && query.dim() <= 4, "query has ", query.dim(),
              " axes: it must be [D], [Hq, D], [B, Hq, D] or [B, Hq, 1, D]");
  const auto check_cache = [&](const char* name, const at::Tensor& cache) {
    TORCH_CHECK(cache.scalar_type() == query.scalar_type(), name, " has dtype ", cache.scalar_type(),
                ": it must be the query's, ", query.scalar_type());
    check_same_device(name, cache, "query", query);
    const std::int64_t axes = query.dim() == 4 ? 4 : query.dim() + 1;
    TORCH_CHECK(cache.dim() == axes, name, " has ", cache.dim(), " axes; with a query of ", query.dim(),
                " axes it must have ", axes);
  };
  check_cache("key", key);
  check_cache("value", value);

  if (is_given("attn_mask", options.attn_mask, query)) {
    const at::ScalarType type = options.attn_mask->scalar_type();
    TORCH_CHECK(type == at::kBool || type == at::kFloat || type == query.scalar_type(), "attn_mask has dtype ", type,
                ": it must be Bool, Float or the query's, ", query.scalar_type());
    TORCH_CHECK(options.attn_mask->dim() <= 4, "attn_mask has ", options.attn_mask->dim(),
                " axes: it must be broadcastable to [B, Hq, N] or [B, Hq, 1, N]");
  }
  if (is_given("lengths", options.lengths, query)) {
    const at::ScalarType type = options.lengths->scalar_type();
    TORCH_CHECK(type == at::kInt || type == at::kLong, "lengths has dtype ", type, ": it must be Int or Long");
    check_axes("lengths", *options.lengths, 1, "[B]");
  }
  if (is_given("page_table", options.page_table, query)) {
    const at::ScalarType type = options.page_table->scalar_type();
    TORCH_CHECK(type == at::kInt, "page_table has dtype ", type, ": it must be Int");
    check_axes("page_table", *options.page_table, 2, "[B, max_pages]");
    TORCH_CHECK(query.dim() >= 3, "query has ", query.dim(), " axes; with page_table it must have 3 or 4");
    TORCH_CHECK(options.lengths.has_value(), "lengths is missing; page_table needs it");
  }
  if (is_given("alibi_slopes", options.alibi_slopes, query)) {
    const at::ScalarType type = options.alibi_slopes->scalar_type();
    TORCH_CHECK(type == at::kFloat, "alibi_slopes has dtype ", type, ": it must be Float");
    const std::int64_t axes = options.alibi_slopes->dim();
    TORCH_CHECK(axes == 1 || axes == 2, "alibi_slopes has ", axes, " axes: it must be [Hq] or [B, Hq]");
  }
  if (is_given("sinks", options.sinks, query)) {
    const at::ScalarType type = options.sinks->scalar_type();
    TORCH_CHECK(type == at::kFloat, "sinks has dtype ", type, ": it must be Float");
    check_axes("sinks", *options.sinks, 1, "[Hq]");
  }
}

AttentionProblem attention_problem(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const AttentionOptions& options, Pointers pointers) {
  check_attention_types(query, key, value, options);
  AttentionProblem problem;
  set_query(problem, query);
  set_cache(problem, key, value, options.page_table.has_value());
  if (options.page_table) {
    set_page_table(problem, *options.page_table);
  }
  if (options.lengths) {
    set_lengths(problem, *options.lengths);
  }
  if (options.attn_mask) {
    set_mask(problem, *options.attn_mask);
  }
  if (options.alibi_slopes) {
    set_alibi_slopes(problem, *options.alibi_slopes);
  }
  if (options.sinks) {
    set_sinks(problem, *options.sinks);
  }
  set_numbers(problem, options);
  if (pointers == Pointers::yes) {
    set_pointers(problem, query, key, value, options);
  }
  return problem;
}

void check_out_type(const at::Tensor& out, const at::Tensor& query) {
  check_defined("out", out);
  TORCH_CHECK(out.scalar_type() == query.scalar_type(), "out has dtype ", out.scalar_type(),
              ": it must be the query's, ", query.scalar_type());
  check_same_device("out", out, "query", query);
  check_axes("out", out, query.dim(), "the query's");
}

void set_output(AttentionProblem& problem, const at::Tensor& out, const at::Tensor& query, Pointers pointers) {
  check_out_type(out, query);
  TORCH_CHECK(out.sizes() == query.sizes(), "out has shape ", out.sizes(), ": it must be the query's, ", query.sizes());
  check_last_axis_contiguous("out", out);
  const QueryAxes axes(out);
  problem.output_stride_batch = stride_or_zero(out, axes.batch);
  problem.output_stride_head = stride_or_zero(out, axes.head);
  if (pointers == Pointers::yes) {
    problem.output = output_address(out);
  }
}

void set_dense_output(AttentionProblem& problem, const at::Tensor& output) {
  problem.output = output_address(output);
  problem.output_stride_batch = problem.query_heads * problem.head_dim;
  problem.output_stride_head = problem.head_dim;
}

void set_dense_lse(AttentionProblem& problem, const at::Tensor& lse) {
  problem.lse = static_cast<float*>(output_address(lse));
  problem.lse_stride_batch = problem.query_heads;
  problem.lse_stride_head = 1;
}

} // namespace single_query
