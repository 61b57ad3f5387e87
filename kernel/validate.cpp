#include "validate.h"

#include "overlap.h"

#include <cmath>
#include <initializer_list>
#include <sstream>

namespace single_query {
namespace {

constexpr std::int64_t most_keys = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t most_rows = std::numeric_limits<std::int32_t>::max(); // of batch, and of heads

// "<function>: <argument> is <value>: <allowed...>"
template <typename Value, typename... Allowed>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* function, const char* argument, const Value& value,
                                                   const Allowed&... allowed) {
  std::ostringstream message;
  message << function << ": " << argument << " is " << value << ": ";
  (message << ... << allowed);
  throw Error(Error::Kind::invalid_argument, message.str());
}

struct Field {
  const char* name;
  std::int64_t value;
};

void require_within(const char* function, const Field& field, std::int64_t least, std::int64_t most) {
  if (field.value < least || field.value > most) {
    refuse(function, field.name, field.value, "it must be ", least, " .. ", most);
  }
}

void require_not_negative(const char* function, std::initializer_list<Field> fields) {
  for (const Field& field : fields) {
    if (field.value < 0) {
      refuse(function, field.name, field.value, "it must not be negative");
    }
  }
}

std::int64_t element_bytes(const char* function, DataType type) {
  switch (type) {
  case DataType::float32:
    return 4;
  case DataType::float16:
  case DataType::bfloat16:
    return 2;
  }
  refuse(function, "dtype", static_cast<std::int32_t>(type), "it must be float32, float16 or bfloat16");
}

std::int64_t element_bytes(MaskType type) {
  switch (type) {
  case MaskType::boolean:
    return 1;
  case MaskType::float32:
    return 4;
  case MaskType::float16:
  case MaskType::bfloat16:
    return 2;
  }
  refuse("attention", "mask_type", static_cast<std::int32_t>(type), "it must be boolean, float32, float16 or bfloat16");
}

std::int64_t element_bytes(LengthType type) {
  switch (type) {
  case LengthType::int32:
    return 4;
  case LengthType::int64:
    return 8;
  }
  refuse("attention", "lengths_type", static_cast<std::int32_t>(type), "it must be int32 or int64");
}

struct Axis {
  std::int64_t size;
  const char* stride_name;
  std::int64_t stride; // in elements
};

// A tensor of runs of `run` elements; checks everything about it but whom it overlaps. A tensor without elements may
// have any pointer.
MemoryRegion checked_region(const char* function, const char* name, const void* data, std::int64_t bytes,
                            std::int64_t run, std::initializer_list<Axis> axes) {
  MemoryRegion region;
  region.name = name;
  region.start = reinterpret_cast<std::uintptr_t>(data);
  region.run_bytes = run * bytes;
  MemoryRegion::Axis* next = region.axes;
  for (const Axis& axis : axes) {
    require_not_negative(function, {{axis.stride_name, axis.stride}});
    next->size = axis.size;
    // A stride that no index is multiplied with may be anything.
    if (axis.size > 1 && __builtin_mul_overflow(axis.stride, bytes, &next->stride_bytes)) {
      refuse(function, axis.stride_name, axis.stride, "its bytes do not fit into 64 bits");
    }
    ++next;
  }
  if (is_empty(region)) {
    return region;
  }
  if (data == nullptr) {
    refuse(function, name, "null", "it must point to the tensor's elements");
  }
  if (region.start % static_cast<std::uintptr_t>(bytes) != 0) {
    refuse(function, name, data, "it must be aligned to its elements of ", bytes, " bytes");
  }
  if (!measure(region)) {
    refuse(function, name, data, "its sizes times strides do not fit into 64 bits");
  }
  return region;
}

MemoryRegion absent_region() {
  return {};
} // no bytes

void require_disjoint(const char* function, const MemoryRegion& a, const MemoryRegion& b) {
  if (regions_overlap(a, b)) {
    refuse(function, a.name, reinterpret_cast<const void*>(a.start), "its memory overlaps that of ", b.name, " (",
           reinterpret_cast<const void*>(b.start), "): the two must be disjoint");
  }
}

void require_disjoint_with_itself(const char* function, const MemoryRegion& region) {
  if (overlaps_itself(region)) {
    refuse(function, region.name, reinterpret_cast<const void*>(region.start),
           "its elements overlap each other: its strides must keep them apart");
  }
}

// What is written overlaps nothing.
template <std::size_t inputs_count>
void require_outputs_alone(const char* function, const MemoryRegion& output, const MemoryRegion& lse,
                           const MemoryRegion (&inputs)[inputs_count]) {
  require_disjoint_with_itself(function, output);
  require_disjoint_with_itself(function, lse);
  require_disjoint(function, output, lse);
  for (const MemoryRegion& input : inputs) {
    require_disjoint(function, output, input);
    require_disjoint(function, lse, input);
  }
}

void check_sizes(const AttentionProblem& p) {
  constexpr const char* function = "attention";
  require_within(function, {"batch", p.batch}, 0, most_rows);
  require_within(function, {"query_heads", p.query_heads}, 0, most_rows);
  require_within(function, {"kv_heads", p.kv_heads}, p.query_heads > 0 ? 1 : 0, most_rows);
  if (p.query_heads > 0 && p.query_heads % p.kv_heads != 0) {
    refuse(function, "query_heads", p.query_heads, "it must be a multiple of kv_heads (", p.kv_heads, ")");
  }
  require_within(function, {"head_dim", p.head_dim}, 1, max_head_dim);
  require_not_negative(function, {{"pages", p.pages}, {"max_pages", p.max_pages}, {"page_size", p.page_size}});
  if (p.page_table == nullptr) {
    require_within(function, {"page_size", p.page_size}, 0, most_keys);
    if (p.max_pages != 1) {
      refuse(function, "max_pages", p.max_pages, "it must be 1 without a page_table");
    }
    if (p.pages != p.batch) {
      refuse(function, "pages", p.pages, "it must be batch (", p.batch, ") without a page_table");
    }
    return;
  }
  require_within(function, {"page_size", p.page_size}, 1, most_keys);
  if (p.max_pages > most_keys / p.page_size) {
    refuse(function, "max_pages", p.max_pages, "it must be at most ", most_keys / p.page_size,
           ", since max_pages * page_size is at most ", most_keys);
  }
}

void check_numbers(const AttentionProblem& p) {
  constexpr const char* function = "attention";
  if (!std::isfinite(p.scale)) {
    refuse(function, "scale", p.scale, "it must be a finite number; 1 / sqrt(head_dim) is the usual one");
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    refuse(function, "softcap", p.softcap, "it must be a positive finite number, or 0 for none");
  }
  require_not_negative(function, {{"window", p.window}, {"split_size", p.split_size}});
}

// The tensors of a problem, in one order: what is written, then what is read.
struct AttentionRegions {
  MemoryRegion output;
  MemoryRegion lse;
  MemoryRegion inputs[8];
};

AttentionRegions checked_regions(const AttentionProblem& p) {
  constexpr const char* function = "attention";
  const std::int64_t bytes = element_bytes(function, p.dtype);
  const std::int64_t capacity = p.max_pages * p.page_size;
  const std::int64_t pages = capacity == 0 ? 0 : p.pages;
  return {checked_region(function, "output", p.output, bytes, p.head_dim,
                         {{p.batch, "output_stride_batch", p.output_stride_batch},
                          {p.query_heads, "output_stride_head", p.output_stride_head}}),
          p.lse == nullptr ? absent_region()
                           : checked_region(function, "lse", p.lse, 4, 1,
                                            {{p.batch, "lse_stride_batch", p.lse_stride_batch},
                                             {p.query_heads, "lse_stride_head", p.lse_stride_head}}),
          {checked_region(function, "query", p.query, bytes, p.head_dim,
                          {{p.batch, "query_stride_batch", p.query_stride_batch},
                           {p.query_heads, "query_stride_head", p.query_stride_head}}),
           checked_region(function, "key", p.key, bytes, p.head_dim,
                          {{pages, "key_stride_page", p.key_stride_page},
                           {p.kv_heads, "key_stride_head", p.key_stride_head},
                           {p.page_size, "key_stride_slot", p.key_stride_slot}}),
           checked_region(function, "value", p.value, bytes, p.head_dim,
                          {{pages, "value_stride_page", p.value_stride_page},
                           {p.kv_heads, "value_stride_head", p.value_stride_head},
                           {p.page_size, "value_stride_slot", p.value_stride_slot}}),
           p.page_table == nullptr
               ? absent_region()
               : checked_region(function, "page_table", p.page_table, 4, 1,
                                {{p.batch, "page_table_stride_batch", p.page_table_stride_batch},
                                 {p.max_pages, "page_table_stride_page", p.page_table_stride_page}}),
           p.lengths == nullptr ? absent_region()
                                : checked_region(function, "lengths", p.lengths, element_bytes(p.lengths_type), 1,
                                                 {{p.batch, "lengths_stride", p.lengths_stride}}),
           p.alibi_slopes == nullptr ? absent_region()
                                     : checked_region(function, "alibi_slopes", p.alibi_slopes, 4, 1,
                                                      {{p.batch, "alibi_stride_batch", p.alibi_stride_batch},
                                                       {p.query_heads, "alibi_stride_head", p.alibi_stride_head}}),
           p.attn_mask == nullptr ? absent_region()
                                  : checked_region(function, "attn_mask", p.attn_mask, element_bytes(p.mask_type), 1,
                                                   {{p.batch, "mask_stride_batch", p.mask_stride_batch},
                                                    {p.query_heads, "mask_stride_head", p.mask_stride_head},
                                                    {capacity, "mask_stride_key", p.mask_stride_key}}),
           p.sinks == nullptr
               ? absent_region()
               : checked_region(function, "sinks", p.sinks, 4, 1, {{p.query_heads, "sinks_stride", p.sinks_stride}})}};
}

} // namespace

void validate(const AttentionProblem& problem) {
  element_bytes("attention", problem.dtype);
  check_sizes(problem);
  check_numbers(problem);
  if (problem.batch == 0 || problem.query_heads == 0) {
    return; // nothing is read or written
  }
  if (problem.page_table != nullptr && problem.lengths == nullptr) {
    refuse("attention", "lengths", "null", "it must be given with a page_table");
  }
  const AttentionRegions regions = checked_regions(problem);
  require_outputs_alone("attention", regions.output, regions.lse, regions.inputs);
}

void validate(const MergeProblem& p) {
  constexpr const char* function = "merge";
  const std::int64_t bytes = element_bytes(function, p.dtype);
  require_within(function, {"parts", p.parts}, 0, most_rows);
  require_within(function, {"batch", p.batch}, 0, most_rows);
  require_within(function, {"heads", p.heads}, 0, most_rows);
  require_within(function, {"head_dim", p.head_dim}, 1, max_head_dim);
  const MemoryRegion output = checked_region(
      function, "output", p.output, bytes, p.head_dim,
      {{p.batch, "output_stride_batch", p.output_stride_batch}, {p.heads, "output_stride_head", p.output_stride_head}});
  const MemoryRegion output_lse = p.output_lse == nullptr
                                      ? absent_region()
                                      : checked_region(function, "output_lse", p.output_lse, 4, 1,
                                                       {{p.batch, "output_lse_stride_batch", p.output_lse_stride_batch},
                                                        {p.heads, "output_lse_stride_head", p.output_lse_stride_head}});
  const MemoryRegion inputs[] = {checked_region(function, "outputs", p.outputs, bytes, p.head_dim,
                                                {{p.parts, "outputs_stride_part", p.outputs_stride_part},
                                                 {p.batch, "outputs_stride_batch", p.outputs_stride_batch},
                                                 {p.heads, "outputs_stride_head", p.outputs_stride_head}}),
                                 checked_region(function, "lse", p.lse, 4, 1,
                                                {{p.parts, "lse_stride_part", p.lse_stride_part},
                                                 {p.batch, "lse_stride_batch", p.lse_stride_batch},
                                                 {p.heads, "lse_stride_head", p.lse_stride_head}})};
  require_outputs_alone(function, output, output_lse, inputs);
}

void refuse_splits(const AttentionProblem& problem) {
  refuse("attention", "split_size", problem.split_size, "the workspace for so many splits does not fit into 64 bits");
}

void validate_workspace(const void* workspace, std::size_t given, std::size_t needed, std::size_t alignment) {
  constexpr const char* function = "attention";
  if (needed == 0) {
    return;
  }
  if (given < needed) {
    refuse(function, "workspace_bytes", given, "it must be at least ", needed, " for this problem");
  }
  if (workspace == nullptr) {
    refuse(function, "workspace", "null", "it must point to at least ", needed, " bytes for this problem");
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % alignment != 0) {
    refuse(function, "workspace", workspace, "it must be aligned to ", alignment, " bytes");
  }
}

void validate_workspace(const AttentionProblem& problem, const void* workspace, std::size_t given, std::size_t needed,
                        std::size_t alignment) {
  validate_workspace(workspace, given, needed, alignment);
  if (needed == 0) {
    return;
  }
  MemoryRegion region;
  region.name = "workspace";
  region.start = reinterpret_cast<std::uintptr_t>(workspace);
  region.run_bytes = region.extent = static_cast<std::int64_t>(needed);
  const AttentionRegions regions = checked_regions(problem);
  require_outputs_alone("attention", region, absent_region(), regions.inputs);
  require_disjoint("attention", region, regions.output);
  require_disjoint("attention", region, regions.lse);
}

} // namespace single_query
