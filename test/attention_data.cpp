#include "attention_data.h"

#include "element.h"

#include <algorithm>
#include <stdexcept>

namespace single_query::test {

const std::array<const char*, tensor_count> tensor_names = {"query", "key",  "value", "page_table", "lengths",
                                                            "alibi", "mask", "sinks", "output",     "lse"};

// A stride that an axis of size 1 may have, since nothing multiplies it but 0.
constexpr std::int64_t garbage_stride = 0x7ff3456789abc;

Plan plan(const Layout& layout, const std::map<char, std::int64_t>& sizes, std::int64_t row, bool garbage_strides) {
  if (layout.order.size() != sizes.size()) {
    throw std::invalid_argument("a layout names each axis once: " + layout.order);
  }
  Plan result;
  std::int64_t stride = row + layout.pad;
  bool empty = row == 0;
  for (auto axis = layout.order.rbegin(); axis != layout.order.rend(); ++axis) {
    const auto size = sizes.find(*axis);
    if (size == sizes.end()) {
      throw std::invalid_argument("a layout with an axis that the tensor does not have: " + layout.order);
    }
    const bool shared = layout.shared.find(*axis) != std::string::npos;
    result.strides[*axis] = shared ? 0 : garbage_strides && size->second == 1 ? garbage_stride : stride;
    stride *= shared ? 1 : size->second;
    empty = empty || size->second == 0;
  }
  result.elements = layout.offset + (empty ? 0 : stride - layout.pad);
  return result;
}

namespace {

DataType mask_data_type(MaskType type) {
  return type == MaskType::float16    ? DataType::float16
         : type == MaskType::bfloat16 ? DataType::bfloat16
                                      : DataType::float32;
}

} // namespace

void AttentionData::lay_out() {
  const AttentionCase& c = case_;
  if (c.kv_heads < 1 || c.query_heads % c.kv_heads != 0 || c.page_table.order.empty() != (c.page_size == 0) ||
      (c.page_size > 0 && c.lengths.order.empty())) {
    throw std::invalid_argument("a case that is no problem: " + to_line(c));
  }
  const auto make = [&](Tensor tensor, const Layout& layout, const std::map<char, std::int64_t>& sizes,
                        std::int64_t row, int element_bytes) {
    if (layout.order.empty()) {
      return Plan();
    }
    Plan result = plan(layout, sizes, row, c.garbage_strides);
    buffer(tensor) = GuardedBuffer(result.elements, element_bytes, c.guarded, c.fill, c.dtype == DataType::bfloat16);
    offset(tensor) = layout.offset;
    return result;
  };
  const int element_bytes = format_of(c.dtype).bytes;
  AttentionProblem& p = layout_;
  p.dtype = c.dtype;
  p.batch = c.batch;
  p.query_heads = c.query_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.head_dim;
  p.pages = c.page_size > 0 ? c.batch * c.max_pages() + c.spare_pages : c.batch;
  p.page_size = c.page_size > 0 ? c.page_size : c.keys;
  p.max_pages = c.max_pages();
  p.lengths_type = c.lengths_type;
  p.scale = c.scale;
  p.window = c.window;
  p.softcap = c.softcap;
  p.mask_type = c.mask_type;
  p.split_size = c.split_size;

  Plan made = make(Tensor::query, c.query, {{'b', c.batch}, {'h', c.query_heads}}, c.head_dim, element_bytes);
  p.query_stride_batch = made.strides['b'];
  p.query_stride_head = made.strides['h'];
  made = make(Tensor::output, c.output, {{'b', c.batch}, {'h', c.query_heads}}, c.head_dim, element_bytes);
  p.output_stride_batch = made.strides['b'];
  p.output_stride_head = made.strides['h'];
  made = make(Tensor::lse, c.lse, {{'b', c.batch}, {'h', c.query_heads}}, 1, 4);
  p.lse_stride_batch = made.strides['b'];
  p.lse_stride_head = made.strides['h'];

  std::map<char, std::int64_t> cache = {{'b', p.pages}, {'h', c.kv_heads}, {'s', p.page_size}};
  if (c.interleaved()) {
    cache['2'] = 2;
  }
  made = make(Tensor::key, c.key, cache, c.head_dim, element_bytes);
  p.key_stride_page = made.strides['b'];
  p.key_stride_head = made.strides['h'];
  p.key_stride_slot = made.strides['s'];
  if (c.interleaved()) {
    offset(Tensor::value) = c.key.offset + made.strides['2'];
  } else {
    made = make(Tensor::value, c.value, cache, c.head_dim, element_bytes);
  }
  p.value_stride_page = made.strides['b'];
  p.value_stride_head = made.strides['h'];
  p.value_stride_slot = made.strides['s'];

  made = make(Tensor::page_table, c.page_table, {{'b', c.batch}, {'p', p.max_pages}}, 1, 4);
  p.page_table_stride_batch = made.strides['b'];
  p.page_table_stride_page = made.strides['p'];
  made = make(Tensor::lengths, c.lengths, {{'b', c.batch}}, 1, c.lengths_type == LengthType::int64 ? 8 : 4);
  p.lengths_stride = made.strides['b'];
  made = make(Tensor::alibi, c.alibi, {{'b', c.batch}, {'h', c.query_heads}}, 1, 4);
  p.alibi_stride_batch = made.strides['b'];
  p.alibi_stride_head = made.strides['h'];
  const int mask_bytes = c.mask_type == MaskType::boolean ? 1 : format_of(mask_data_type(c.mask_type)).bytes;
  made = make(Tensor::mask, c.mask, {{'b', c.batch}, {'h', c.query_heads}, {'k', c.capacity()}}, 1, mask_bytes);
  p.mask_stride_batch = made.strides['b'];
  p.mask_stride_head = made.strides['h'];
  p.mask_stride_key = made.strides['k'];
  made = make(Tensor::sinks, c.sinks, {{'h', c.query_heads}}, 1, 4);
  p.sinks_stride = made.strides['h'];
}

AttentionProblem AttentionData::problem(const PerTensor<std::byte*>& memory) const {
  AttentionProblem p = layout_;
  const auto first = [&](Tensor tensor) -> std::byte* {
    const Tensor owner = tensor == Tensor::value && case_.interleaved() ? Tensor::key : tensor;
    const GuardedBuffer& owned = buffer(owner);
    std::byte* start = memory[static_cast<std::size_t>(owner)];
    return start == nullptr ? nullptr : start + owned.guard_bytes() + offset(tensor) * owned.element_bytes();
  };
  p.query = first(Tensor::query);
  p.key = first(Tensor::key);
  p.value = first(Tensor::value);
  p.output = first(Tensor::output);
  p.lse = reinterpret_cast<float*>(first(Tensor::lse));
  p.page_table = reinterpret_cast<const std::int32_t*>(first(Tensor::page_table));
  p.lengths = first(Tensor::lengths);
  p.alibi_slopes = reinterpret_cast<const float*>(first(Tensor::alibi));
  p.attn_mask = first(Tensor::mask);
  p.sinks = reinterpret_cast<const float*>(first(Tensor::sinks));
  return p;
}

AttentionProblem AttentionData::host_problem() const {
  PerTensor<std::byte*> memory;
  std::transform(buffers_.begin(), buffers_.end(), memory.begin(),
                 [](const GuardedBuffer& owned) { return const_cast<std::byte*>(owned.bytes().data()); });
  return problem(memory);
}

void AttentionData::each_row(Tensor tensor,
                             const std::function<void(std::int64_t element, std::int64_t row)>& write) const {
  const bool is_lse = tensor == Tensor::lse;
  const std::int64_t batch_stride = is_lse ? layout_.lse_stride_batch : layout_.output_stride_batch;
  const std::int64_t head_stride = is_lse ? layout_.lse_stride_head : layout_.output_stride_head;
  for (std::int64_t b = 0; b < case_.batch; ++b) {
    for (std::int64_t h = 0; h < case_.query_heads; ++h) {
      write(offset(tensor) + b * batch_stride + h * head_stride, b * case_.query_heads + h);
    }
  }
}

DataType AttentionData::type_of(Tensor tensor) const {
  switch (tensor) {
  case Tensor::query:
  case Tensor::key:
  case Tensor::value:
  case Tensor::output:
    return case_.dtype;
  case Tensor::mask:
    return mask_data_type(case_.mask_type);
  default:
    return DataType::float32;
  }
}

// Elements are counted from the tensor's first one; an interleaved value's lie in the key's buffer.
double AttentionData::get(Tensor tensor, std::int64_t element) const {
  const Tensor owner = tensor == Tensor::value && case_.interleaved() ? Tensor::key : tensor;
  return decode(type_of(tensor), buffer(owner).data(), offset(tensor) + element);
}

void AttentionData::set(Tensor tensor, std::int64_t element, double value) {
  const Tensor owner = tensor == Tensor::value && case_.interleaved() ? Tensor::key : tensor;
  encode(type_of(tensor), buffer(owner).data(), offset(tensor) + element, value);
}

std::int64_t AttentionData::first_key(std::int64_t b) const {
  return case_.window > 0 ? std::max<std::int64_t>(length(b) - case_.window, 0) : 0;
}

bool AttentionData::takes_part(std::int64_t b, std::int64_t h, std::int64_t n) const {
  if (n < first_key(b) || n >= length(b)) {
    return false;
  }
  if (case_.mask.order.empty()) {
    return true;
  }
  const std::int64_t at = mask_element(b, h, n);
  return case_.mask_type == MaskType::boolean ? buffer(Tensor::mask).data()[offset(Tensor::mask) + at] != std::byte(0)
                                              : get(Tensor::mask, at) != -INFINITY;
}

std::int64_t AttentionData::query_row(std::int64_t b, std::int64_t h) const {
  return b * layout_.query_stride_batch + h * layout_.query_stride_head;
}

std::int64_t AttentionData::mask_element(std::int64_t b, std::int64_t h, std::int64_t n) const {
  return b * layout_.mask_stride_batch + h * layout_.mask_stride_head + n * layout_.mask_stride_key;
}

std::int64_t AttentionData::page_of(std::int64_t b, std::int64_t n) const {
  if (case_.page_size == 0) {
    return b;
  }
  const std::int64_t at = offset(Tensor::page_table) + b * layout_.page_table_stride_batch +
                          n / case_.page_size * layout_.page_table_stride_page;
  return reinterpret_cast<const std::int32_t*>(buffer(Tensor::page_table).data())[at];
}

std::int64_t AttentionData::key_row(std::int64_t b, std::int64_t kv_head, std::int64_t n) const {
  return page_of(b, n) * layout_.key_stride_page + kv_head * layout_.key_stride_head +
         (case_.page_size > 0 ? n % case_.page_size : n) * layout_.key_stride_slot;
}

std::int64_t AttentionData::value_row(std::int64_t b, std::int64_t kv_head, std::int64_t n) const {
  return page_of(b, n) * layout_.value_stride_page + kv_head * layout_.value_stride_head +
         (case_.page_size > 0 ? n % case_.page_size : n) * layout_.value_stride_slot;
}

void AttentionData::set_query(std::int64_t b, std::int64_t h, std::int64_t d, double value) {
  set(Tensor::query, query_row(b, h) + d, value);
}

void AttentionData::set_key(std::int64_t b, std::int64_t kv_head, std::int64_t n, std::int64_t d, double value) {
  set(Tensor::key, key_row(b, kv_head, n) + d, value);
}

void AttentionData::set_value(std::int64_t b, std::int64_t kv_head, std::int64_t n, std::int64_t d, double value) {
  set(Tensor::value, value_row(b, kv_head, n) + d, value);
}

void AttentionData::set_mask(std::int64_t b, std::int64_t h, std::int64_t n, double value) {
  const std::int64_t at = mask_element(b, h, n);
  if (case_.mask_type == MaskType::boolean) {
    buffer(Tensor::mask).data()[offset(Tensor::mask) + at] = std::byte(value != 0 ? 1 + n % 3 * 120 : 0); // any but 0
  } else {
    set(Tensor::mask, at, value);
  }
}

void AttentionData::set_length(std::int64_t b, std::int64_t value) {
  const std::int64_t at = offset(Tensor::lengths) + b * layout_.lengths_stride;
  std::byte* lengths = buffer(Tensor::lengths).data();
  if (case_.lengths_type == LengthType::int64) {
    reinterpret_cast<std::int64_t*>(lengths)[at] = value;
  } else {
    reinterpret_cast<std::int32_t*>(lengths)[at] = static_cast<std::int32_t>(value);
  }
  lengths_[static_cast<std::size_t>(b)] = std::clamp<std::int64_t>(value, 0, case_.capacity());
  if (!free_pages_.empty()) {
    assign_pages(b);
  }
}

void AttentionData::set_page(std::int64_t b, std::int64_t page, std::int32_t value) {
  const std::int64_t at =
      offset(Tensor::page_table) + b * layout_.page_table_stride_batch + page * layout_.page_table_stride_page;
  reinterpret_cast<std::int32_t*>(buffer(Tensor::page_table).data())[at] = value;
}

void AttentionData::set_alibi_slope(std::int64_t b, std::int64_t h, float value) {
  set(Tensor::alibi, b * layout_.alibi_stride_batch + h * layout_.alibi_stride_head, value);
}

void AttentionData::set_sink(std::int64_t h, float value) {
  set(Tensor::sinks, h * layout_.sinks_stride, value);
}

void AttentionData::copy_row(std::int64_t b, AttentionData& to, std::int64_t to_batch, std::int64_t shift) const {
  const AttentionCase& c = case_;
  const std::int64_t group = c.query_heads / c.kv_heads;
  const std::int64_t first = first_key(b);
  const bool boolean = c.mask_type == MaskType::boolean;
  for (std::int64_t h = 0; h < c.query_heads; ++h) {
    for (std::int64_t d = 0; d < c.head_dim; ++d) {
      to.set_query(to_batch, h, d, get(Tensor::query, query_row(b, h) + d));
      for (std::int64_t n = first; h % group == 0 && n < length(b); ++n) {
        to.set_key(to_batch, h / group, n - shift, d, get(Tensor::key, key_row(b, h / group, n) + d));
        to.set_value(to_batch, h / group, n - shift, d, get(Tensor::value, value_row(b, h / group, n) + d));
      }
    }
    for (std::int64_t n = first; !to.case_.mask.order.empty() && n < length(b); ++n) {
      to.set_mask(to_batch, h, n - shift, boolean ? takes_part(b, h, n) : get(Tensor::mask, mask_element(b, h, n)));
    }
    if (!c.alibi.order.empty()) {
      const std::int64_t at = b * layout_.alibi_stride_batch + h * layout_.alibi_stride_head;
      to.set_alibi_slope(to_batch, h, static_cast<float>(get(Tensor::alibi, at)));
    }
    if (!c.sinks.order.empty()) {
      to.set_sink(h, static_cast<float>(get(Tensor::sinks, h * layout_.sinks_stride)));
    }
  }
}

void AttentionData::set_scores(std::int64_t b, std::int64_t kv_head, const std::vector<double>& scores,
                               const std::vector<double>& values) {
  const std::int64_t group = case_.query_heads / case_.kv_heads;
  for (std::int64_t d = 0; d < case_.head_dim; ++d) {
    for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      set_query(b, h, d, d == 0);
    }
    for (std::size_t n = 0; n < scores.size(); ++n) {
      set_key(b, kv_head, static_cast<std::int64_t>(n), d, d == 0 ? scores[n] : 0);
      set_value(b, kv_head, static_cast<std::int64_t>(n), d, values[n]);
    }
  }
}

} // namespace single_query::test
