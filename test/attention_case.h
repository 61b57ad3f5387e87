// One configuration of attention: everything that decides a test call, in one line of text that reproduces it.
#pragma once

#include "guarded_buffer.h"
#include "single_query/attention.h"

#include <cstdint>
#include <string>

namespace single_query::test {

// How a tensor's axes lie in memory. Letters: b batch (or page), h head, s slot, k key, p page of a row; the last axis
// (head_dim, or nothing) is not named. As text: order, then optionally /shared +pad @offset, as in "hbs/h+2@1".
struct Layout {
  std::string order = {};  // from the slowest axis to the fastest; empty: the tensor is absent
  std::string shared = {}; // axes of stride 0
  std::int64_t pad = 0;    // unused elements after each head_dim row (or after each element, where there is no row)
  std::int64_t offset = 0; // elements between the start of the allocation and the first element
  bool operator==(const Layout&) const = default;
};

enum class LengthKind {
  full,
  random, // 0 .. capacity
  brief,  // 0 .. 8
  mixed   // 0, 1, capacity, past the capacity, negative and random ones
};

enum class Values {
  random,
  zero_keys, // every score is 0, values are small integers: a mean, exact where the number of keys is a power of two
  one_hot    // one key takes all the weight: its value comes out bit for bit
};

struct AttentionCase {
  DataType dtype = DataType::float32;
  std::int64_t batch = 1;
  std::int64_t query_heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t keys = 1; // what is allocated for a row; rounded up to whole pages
  std::int64_t head_dim = 1;

  Layout query = {"bh"};
  Layout key = {"bhs"};   // with an axis 2 in its order, as in "b2sh", the value is interleaved with it
  Layout value = {"bhs"}; // not looked at then
  Layout output = {"bh"};
  Layout lse = {"bh"};
  bool garbage_strides = false; // on axes of size 1

  Layout lengths; // "b"
  LengthType lengths_type = LengthType::int32;
  LengthKind length_kind = LengthKind::random;
  std::int64_t page_size = 0; // 0: contiguous
  Layout page_table;          // "bp"; needed with a page_size
  std::int64_t spare_pages = 0;

  float scale = 1;
  std::int64_t window = 0;
  float softcap = 0;
  Layout alibi; // "bh"
  Layout mask;  // "bhk"
  MaskType mask_type = MaskType::boolean;
  double mask_keep = 0.5; // share of the keys that it lets in
  bool evicted = false;   // pages whose keys the mask excludes for every head do not exist
  Layout sinks;           // "h"
  std::int64_t split_size = 0;

  Values values = Values::random;
  double query_magnitude = 1;
  double key_magnitude = 1;
  double value_magnitude = 1;
  double value_mean = 0;
  std::int64_t specials = 0; // NaN and infinities placed among the elements that take part
  Fill fill = Fill::nan;
  bool guarded = true; // off: allocations of the exact size, for tools that watch them
  std::uint64_t seed = 1;

  bool operator==(const AttentionCase&) const = default;
  bool interleaved() const { return key.order.find('2') != std::string::npos; }
  std::int64_t max_pages() const { return page_size > 0 ? (keys + page_size - 1) / page_size : 1; }
  std::int64_t capacity() const { return page_size > 0 ? max_pages() * page_size : keys; }
};

// Dense tensors of that shape, with the usual scale and scores of some size. group: query heads per key/value head.
AttentionCase sized(DataType dtype, std::int64_t batch, std::int64_t kv_heads, std::int64_t group, std::int64_t keys,
                    std::int64_t head_dim);

// "name=value ..." of what differs from the defaults above; parse_case reads it back. Throws std::invalid_argument for
// a name or a value that there is none of.
std::string to_line(const AttentionCase& attention_case);
AttentionCase parse_case(const std::string& line);

} // namespace single_query::test
