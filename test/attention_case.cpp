#include "attention_case.h"

#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <type_traits>

namespace single_query::test {
namespace {

constexpr std::array<const char*, 3> data_type_names = {"float32", "float16", "bfloat16"};
constexpr std::array<const char*, 4> mask_type_names = {"boolean", "float32", "float16", "bfloat16"};
constexpr std::array<const char*, 2> length_type_names = {"int32", "int64"};
constexpr std::array<const char*, 4> length_kind_names = {"full", "random", "brief", "mixed"};
constexpr std::array<const char*, 3> values_names = {"random", "zero_keys", "one_hot"};
constexpr std::array<const char*, 3> fill_names = {"nan", "infinity", "byte_7f"};

const auto& names_of(DataType) {
  return data_type_names;
}
const auto& names_of(MaskType) {
  return mask_type_names;
}
const auto& names_of(LengthType) {
  return length_type_names;
}
const auto& names_of(LengthKind) {
  return length_kind_names;
}
const auto& names_of(Values) {
  return values_names;
}
const auto& names_of(Fill) {
  return fill_names;
}

template <class Enum>
requires std::is_enum_v<Enum> std::string to_text(Enum value) {
  return names_of(value)[static_cast<std::size_t>(value)];
}

template <class Enum>
requires std::is_enum_v<Enum>
void from_text(const std::string& text, Enum& value) {
  const auto& names = names_of(value);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (text == names[i]) {
      value = static_cast<Enum>(i);
      return;
    }
  }
  throw std::invalid_argument("no such value: " + text);
}

template <class Number>
requires std::is_arithmetic_v<Number> std::string to_text(Number value) {
  std::ostringstream text;
  text.precision(std::numeric_limits<Number>::max_digits10);
  text << value;
  return text.str();
}

template <class Number>
requires std::is_arithmetic_v<Number>
void from_text(const std::string& text, Number& value) {
  std::istringstream stream(text);
  if (!(stream >> value) || !stream.eof()) {
    throw std::invalid_argument("not a number: " + text);
  }
}

std::string to_text(const Layout& layout) {
  std::string text = layout.order.empty() ? "none" : layout.order;
  text += layout.shared.empty() ? "" : "/" + layout.shared;
  text += layout.pad == 0 ? "" : "+" + std::to_string(layout.pad);
  text += layout.offset == 0 ? "" : "@" + std::to_string(layout.offset);
  return text;
}

void from_text(const std::string& text, Layout& layout) {
  layout = {};
  const auto part = [&](char mark) {
    const std::size_t at = mark == 0 ? 0 : text.find(mark);
    if (at == std::string::npos) {
      return std::string();
    }
    const std::size_t begin = mark == 0 ? 0 : at + 1;
    return text.substr(begin, text.find_first_of("/+@", begin) - begin);
  };
  layout.order = part(0) == "none" ? "" : part(0);
  layout.shared = part('/');
  if (const std::string pad = part('+'); !pad.empty()) {
    from_text(pad, layout.pad);
  }
  if (const std::string offset = part('@'); !offset.empty()) {
    from_text(offset, layout.offset);
  }
}

// Calls visit(name, field) for every field.
template <class Case, class Visit>
void visit_fields(Case& c, const Visit& visit) {
  visit("dtype", c.dtype);
  visit("batch", c.batch);
  visit("query_heads", c.query_heads);
  visit("kv_heads", c.kv_heads);
  visit("keys", c.keys);
  visit("head_dim", c.head_dim);
  visit("query", c.query);
  visit("key", c.key);
  visit("value", c.value);
  visit("output", c.output);
  visit("lse", c.lse);
  visit("garbage_strides", c.garbage_strides);
  visit("lengths", c.lengths);
  visit("lengths_type", c.lengths_type);
  visit("length_kind", c.length_kind);
  visit("page_size", c.page_size);
  visit("page_table", c.page_table);
  visit("spare_pages", c.spare_pages);
  visit("scale", c.scale);
  visit("window", c.window);
  visit("softcap", c.softcap);
  visit("alibi", c.alibi);
  visit("mask", c.mask);
  visit("mask_type", c.mask_type);
  visit("mask_keep", c.mask_keep);
  visit("evicted", c.evicted);
  visit("sinks", c.sinks);
  visit("split_size", c.split_size);
  visit("values", c.values);
  visit("query_magnitude", c.query_magnitude);
  visit("key_magnitude", c.key_magnitude);
  visit("value_magnitude", c.value_magnitude);
  visit("value_mean", c.value_mean);
  visit("specials", c.specials);
  visit("fill", c.fill);
  visit("guarded", c.guarded);
  visit("seed", c.seed);
}

} // namespace

std::string to_line(const AttentionCase& attention_case) {
  AttentionCase defaults;
  std::string line;
  std::array<std::string, 64> default_texts;
  std::size_t index = 0;
  visit_fields(defaults, [&](const char*, auto& field) { default_texts[index++] = to_text(field); });
  index = 0;
  visit_fields(attention_case, [&](const char* name, const auto& field) {
    const std::string text = to_text(field);
    if (text != default_texts[index++]) {
      line += (line.empty() ? "" : " ") + std::string(name) + "=" + text;
    }
  });
  return line;
}

AttentionCase parse_case(const std::string& line) {
  AttentionCase result;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    const std::string given = word.substr(0, equals);
    bool known = false;
    visit_fields(result, [&](const char* name, auto& field) {
      if (given == name) {
        known = true;
        from_text(equals == std::string::npos ? "" : word.substr(equals + 1), field);
      }
    });
    if (!known) {
      throw std::invalid_argument("no field of a case is called " + given);
    }
  }
  return result;
}

AttentionCase sized(DataType dtype, std::int64_t batch, std::int64_t kv_heads, std::int64_t group, std::int64_t keys,
                    std::int64_t head_dim) {
  AttentionCase c;
  c.dtype = dtype;
  c.batch = batch;
  c.kv_heads = kv_heads;
  c.query_heads = kv_heads * group;
  c.keys = keys;
  c.head_dim = head_dim;
  c.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  c.key_magnitude = 4;
  return c;
}

} // namespace single_query::test
