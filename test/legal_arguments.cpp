#include "legal_arguments.h"

#include <cmath>
#include <initializer_list>
#include <limits>

namespace single_query::test {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();

bool within(std::int64_t x, std::int64_t low, std::int64_t high) {
  return low <= x && x <= high;
}

void judge_tensor(const TensorArgument& tensor, Faults& faults) {
  constexpr auto int64_most = static_cast<__int128>(std::numeric_limits<std::int64_t>::max());
  __int128 extent = static_cast<__int128>(tensor.run) * tensor.bytes;
  bool good_strides = true;
  for (const auto& axis : tensor.axes) {
    const bool good =
        axis.stride >= 0 && (axis.size <= 1 || static_cast<__int128>(axis.stride) * tensor.bytes <= int64_most);
    faults.unless(good, {axis.stride_name});
    good_strides = good_strides && good;
    extent += axis.size <= 1 ? 0 : static_cast<__int128>(axis.size - 1) * axis.stride * tensor.bytes;
  }
  if (tensor.empty() || !good_strides) {
    return;
  }
  const bool fits = extent <= int64_most && static_cast<__int128>(tensor.start()) + extent <
                                                static_cast<__int128>(std::numeric_limits<std::uint64_t>::max()) + 1;
  faults.unless(fits && tensor.data != nullptr && tensor.start() % static_cast<std::uintptr_t>(tensor.bytes) == 0,
                {tensor.name});
}

// Both are legal by themselves. Of one tensor with itself: whether two of its runs overlap.
void judge_overlap(const TensorArgument& a, const TensorArgument& b, Faults& faults) {
  if (a.empty() || b.empty() || a.end() <= b.start() || b.end() <= a.start()) {
    return;
  }
  if (!a.few_runs() || !b.few_runs()) {
    faults.unsure = true;
    return;
  }
  const auto runs_a = a.runs();
  const auto runs_b = b.runs();
  const bool same = &a == &b;
  bool overlap = false;
  for (std::size_t i = 0, j = same ? 1 : 0; i < runs_a.size() && j < runs_b.size() && !overlap;) {
    overlap = runs_a[i].first < runs_b[j].second && runs_b[j].first < runs_a[i].second;
    if (same) {
      ++i, ++j;
    } else if (runs_a[i].second <= runs_b[j].second) {
      ++i;
    } else {
      ++j;
    }
  }
  if (overlap) {
    faults.add({a.name, b.name});
  }
}

void judge_tensors(const std::vector<TensorArgument>& tensors, Faults& faults) {
  for (const TensorArgument& tensor : tensors) {
    judge_tensor(tensor, faults);
  }
  if (!faults.names.empty()) {
    return; // extents may not fit
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::size_t j = i; j < tensors.size(); ++j) {
      if (tensors[i].written || (j != i && tensors[j].written)) {
        judge_overlap(tensors[i], tensors[j], faults);
      }
    }
  }
}

} // namespace

std::int64_t element_bytes_of(DataType type) {
  return type == DataType::float32 ? 4 : 2;
}

// The tensors that a call reads or writes. The sizes are legal.

std::uintptr_t TensorArgument::end() const {
  std::int64_t extent = run * bytes;
  for (const Axis& axis : axes) {
    extent += axis.size == 1 ? 0 : (axis.size - 1) * axis.stride * bytes;
  }
  return start() + static_cast<std::uintptr_t>(extent);
}

bool TensorArgument::few_runs() const {
  double count = 1;
  for (const Axis& axis : axes) {
    count *= static_cast<double>(axis.size);
  }
  return count <= 5000;
}

std::vector<std::pair<std::uintptr_t, std::uintptr_t>> TensorArgument::runs() const {
  std::vector<std::uintptr_t> starts = {start()};
  for (const Axis& axis : axes) {
    std::vector<std::uintptr_t> next;
    for (const std::uintptr_t from : starts) {
      for (std::int64_t i = 0; i < axis.size; ++i) {
        next.push_back(from + (i == 0 ? 0 : static_cast<std::uintptr_t>(i * axis.stride * bytes)));
      }
    }
    starts = std::move(next);
  }
  std::sort(starts.begin(), starts.end());
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> result;
  result.reserve(starts.size());
  for (const std::uintptr_t from : starts) {
    result.emplace_back(from, from + static_cast<std::uintptr_t>(run * bytes));
  }
  return result;
}

std::vector<TensorArgument> tensors_of(const AttentionProblem& p) {
  const std::int64_t bytes = element_bytes_of(p.dtype);
  const std::int64_t capacity = p.max_pages * p.page_size;
  const std::int64_t pages = capacity == 0 ? 0 : p.pages;
  std::vector<TensorArgument> tensors = {{"output",
                                          p.output,
                                          bytes,
                                          p.head_dim,
                                          {{p.batch, "output_stride_batch", p.output_stride_batch},
                                           {p.query_heads, "output_stride_head", p.output_stride_head}},
                                          true},
                                         {"query",
                                          p.query,
                                          bytes,
                                          p.head_dim,
                                          {{p.batch, "query_stride_batch", p.query_stride_batch},
                                           {p.query_heads, "query_stride_head", p.query_stride_head}}},
                                         {"key",
                                          p.key,
                                          bytes,
                                          p.head_dim,
                                          {{pages, "key_stride_page", p.key_stride_page},
                                           {p.kv_heads, "key_stride_head", p.key_stride_head},
                                           {p.page_size, "key_stride_slot", p.key_stride_slot}}},
                                         {"value",
                                          p.value,
                                          bytes,
                                          p.head_dim,
                                          {{pages, "value_stride_page", p.value_stride_page},
                                           {p.kv_heads, "value_stride_head", p.value_stride_head},
                                           {p.page_size, "value_stride_slot", p.value_stride_slot}}}};
  const auto add_if_given = [&tensors](TensorArgument tensor) {
    if (tensor.data != nullptr) {
      tensors.push_back(std::move(tensor));
    }
  };
  add_if_given(
      {"lse",
       p.lse,
       4,
       1,
       {{p.batch, "lse_stride_batch", p.lse_stride_batch}, {p.query_heads, "lse_stride_head", p.lse_stride_head}},
       true});
  add_if_given({"page_table",
                p.page_table,
                4,
                1,
                {{p.batch, "page_table_stride_batch", p.page_table_stride_batch},
                 {p.max_pages, "page_table_stride_page", p.page_table_stride_page}}});
  add_if_given({"lengths",
                p.lengths,
                p.lengths_type == LengthType::int32 ? 4 : 8,
                1,
                {{p.batch, "lengths_stride", p.lengths_stride}}});
  add_if_given({"alibi_slopes",
                p.alibi_slopes,
                4,
                1,
                {{p.batch, "alibi_stride_batch", p.alibi_stride_batch},
                 {p.query_heads, "alibi_stride_head", p.alibi_stride_head}}});
  add_if_given({"attn_mask",
                p.attn_mask,
                p.mask_type == MaskType::boolean   ? 1
                : p.mask_type == MaskType::float32 ? 4
                                                   : 2,
                1,
                {{p.batch, "mask_stride_batch", p.mask_stride_batch},
                 {p.query_heads, "mask_stride_head", p.mask_stride_head},
                 {capacity, "mask_stride_key", p.mask_stride_key}}});
  add_if_given({"sinks", p.sinks, 4, 1, {{p.query_heads, "sinks_stride", p.sinks_stride}}});
  return tensors;
}

std::vector<TensorArgument> tensors_of(const MergeProblem& p) {
  const std::int64_t bytes = element_bytes_of(p.dtype);
  std::vector<TensorArgument> tensors = {
      {"output",
       p.output,
       bytes,
       p.head_dim,
       {{p.batch, "output_stride_batch", p.output_stride_batch}, {p.heads, "output_stride_head", p.output_stride_head}},
       true},
      {"outputs",
       p.outputs,
       bytes,
       p.head_dim,
       {{p.parts, "outputs_stride_part", p.outputs_stride_part},
        {p.batch, "outputs_stride_batch", p.outputs_stride_batch},
        {p.heads, "outputs_stride_head", p.outputs_stride_head}}},
      {"lse",
       p.lse,
       4,
       1,
       {{p.parts, "lse_stride_part", p.lse_stride_part},
        {p.batch, "lse_stride_batch", p.lse_stride_batch},
        {p.heads, "lse_stride_head", p.lse_stride_head}}}};
  if (p.output_lse != nullptr) {
    tensors.push_back({"output_lse",
                       p.output_lse,
                       4,
                       1,
                       {{p.batch, "output_lse_stride_batch", p.output_lse_stride_batch},
                        {p.heads, "output_lse_stride_head", p.output_lse_stride_head}},
                       true});
  }
  return tensors;
}

Faults faults_of(const AttentionProblem& p) {
  Faults faults;
  faults.unless(within(static_cast<std::int64_t>(p.dtype), 0, 2), {"dtype"});
  faults.unless(within(p.batch, 0, most), {"batch"});
  faults.unless(within(p.query_heads, 0, most), {"query_heads"});
  faults.unless(within(p.kv_heads, p.query_heads > 0 ? 1 : 0, most), {"kv_heads"});
  faults.unless(p.query_heads <= 0 || (p.kv_heads > 0 && p.query_heads % p.kv_heads == 0), {"query_heads", "kv_heads"});
  faults.unless(within(p.head_dim, 1, max_head_dim), {"head_dim"});
  faults.unless(p.pages >= 0, {"pages"});
  faults.unless(within(p.page_size, p.page_table == nullptr ? 0 : 1, most), {"page_size"});
  faults.unless(p.max_pages >= 0 && static_cast<__int128>(p.max_pages) * p.page_size <= most, {"max_pages"});
  faults.unless(p.page_table != nullptr || p.max_pages == 1, {"max_pages"});
  faults.unless(p.page_table != nullptr || p.pages == p.batch, {"pages"});
  faults.unless(std::isfinite(p.scale), {"scale"});
  faults.unless(std::isfinite(p.softcap) && p.softcap >= 0, {"softcap"});
  faults.unless(p.window >= 0, {"window"});
  faults.unless(p.split_size >= 0, {"split_size"});
  if (!faults.names.empty() || p.batch == 0 || p.query_heads == 0) {
    return faults;
  }
  faults.unless(p.page_table == nullptr || p.lengths != nullptr, {"lengths"});
  faults.unless(p.lengths == nullptr || within(static_cast<std::int64_t>(p.lengths_type), 0, 1), {"lengths_type"});
  faults.unless(p.attn_mask == nullptr || within(static_cast<std::int64_t>(p.mask_type), 0, 3), {"mask_type"});
  judge_tensors(tensors_of(p), faults);
  return faults;
}

Faults faults_of(const MergeProblem& p) {
  Faults faults;
  faults.unless(within(static_cast<std::int64_t>(p.dtype), 0, 2), {"dtype"});
  faults.unless(within(p.parts, 0, most), {"parts"});
  faults.unless(within(p.batch, 0, most), {"batch"});
  faults.unless(within(p.heads, 0, most), {"heads"});
  faults.unless(within(p.head_dim, 1, max_head_dim), {"head_dim"});
  if (faults.names.empty()) {
    judge_tensors(tensors_of(p), faults);
  }
  return faults;
}

} // namespace single_query::test
