// The tensors of an AttentionCase: laid out, filled, and poisoned wherever no key that takes part lies.
#pragma once

#include "attention_case.h"
#include "guarded_buffer.h"
#include "random.h"
#include "single_query/attention.h"

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace single_query::test {

// Where a tensor's elements lie.
struct Plan {
  std::map<char, std::int64_t> strides; // by axis
  std::int64_t elements = 0;            // up to and with the last one that is used
};

// `row`: elements of the axis that the layout does not name. Throws std::invalid_argument for axes that are not those
// of `sizes`.
Plan plan(const Layout& layout, const std::map<char, std::int64_t>& sizes, std::int64_t row, bool garbage_strides);

enum class Tensor { query, key, value, page_table, lengths, alibi, mask, sinks, output, lse };
constexpr std::size_t tensor_count = 10;
extern const std::array<const char*, tensor_count> tensor_names;

template <class T>
using PerTensor = std::array<T, tensor_count>;

class AttentionData {
public:
  // Throws std::invalid_argument for a case that cannot be laid out.
  explicit AttentionData(const AttentionCase& attention_case);

  const AttentionCase& attention_case() const { return case_; }

  // The problem over the tensors' memory, given where each one's first guard starts. An interleaved value lies in the
  // key's memory.
  AttentionProblem problem(const PerTensor<std::byte*>& memory) const;
  // The problem over this object's own memory: for the reference, which only reads.
  AttentionProblem host_problem() const;

  GuardedBuffer& buffer(Tensor tensor) { return buffers_[static_cast<std::size_t>(tensor)]; }
  const GuardedBuffer& buffer(Tensor tensor) const { return buffers_[static_cast<std::size_t>(tensor)]; }

  // Calls write(element, row) with where the rows of output and lse lie, in elements from the first; rows are
  // [batch, query_heads].
  void each_row(Tensor tensor, const std::function<void(std::int64_t element, std::int64_t row)>& write) const;

  // Set single elements; `n` is a key of a row, wherever the page table puts it.
  void set_query(std::int64_t b, std::int64_t h, std::int64_t d, double value);
  void set_key(std::int64_t b, std::int64_t kv_head, std::int64_t n, std::int64_t d, double value);
  void set_value(std::int64_t b, std::int64_t kv_head, std::int64_t n, std::int64_t d, double value);
  void set_mask(std::int64_t b, std::int64_t h, std::int64_t n, double value);
  void set_length(std::int64_t b, std::int64_t value); // new keys get pages, which hold poison
  void set_page(std::int64_t b, std::int64_t page, std::int32_t value);
  void set_alibi_slope(std::int64_t b, std::int64_t h, float value);
  void set_sink(std::int64_t h, float value);

  // What row b's keys, query and modifiers hold, written to row `to_batch` of `to`, wherever those lie there: key n to
  // key n - shift.
  void copy_row(std::int64_t b, AttentionData& to, std::int64_t to_batch, std::int64_t shift) const;

  // query = e0 for every head and key[n] = score * e0, so that with scale 1 the score is exactly `score`; and value[n]
  // = value in every element.
  void set_scores(std::int64_t b, std::int64_t kv_head, const std::vector<double>& scores,
                  const std::vector<double>& values);

  // Keys of row b as length and window leave them.
  std::int64_t first_key(std::int64_t b) const;
  std::int64_t length(std::int64_t b) const { return lengths_[static_cast<std::size_t>(b)]; }
  bool takes_part(std::int64_t b, std::int64_t h, std::int64_t n) const;

private:
  std::int64_t offset(Tensor tensor) const { return offsets_[static_cast<std::size_t>(tensor)]; }
  std::int64_t& offset(Tensor tensor) { return offsets_[static_cast<std::size_t>(tensor)]; }
  std::int64_t query_row(std::int64_t b, std::int64_t h) const;
  std::int64_t mask_element(std::int64_t b, std::int64_t h, std::int64_t n) const;
  std::int64_t key_row(std::int64_t b, std::int64_t kv_head, std::int64_t n) const;
  std::int64_t value_row(std::int64_t b, std::int64_t kv_head, std::int64_t n) const;
  std::int64_t page_of(std::int64_t b, std::int64_t n) const;
  DataType type_of(Tensor tensor) const;
  double get(Tensor tensor, std::int64_t element) const;
  void set(Tensor tensor, std::int64_t element, double value);

  void lay_out();
  void fill_lengths(Random& random);
  void fill_page_table(Random& random);
  void assign_pages(std::int64_t b); // to the entries that row b's keys need and have not got
  void fill_mask(Random& random);
  void evict_pages(Random& random);
  void fill_modifiers(Random& random);
  void fill_query_and_cache(Random& random);
  void place_specials(Random& random);

  AttentionCase case_;
  AttentionProblem layout_; // sizes and strides; no pointers
  PerTensor<GuardedBuffer> buffers_;
  PerTensor<std::int64_t> offsets_ = {}; // of the first element from the end of the first guard
  std::vector<std::int64_t> lengths_;    // [batch], clamped
  std::vector<std::int32_t> free_pages_; // in random order
  std::vector<char> assigned_;           // [batch, max_pages]: the page table's entry is one of the pages
};

} // namespace single_query::test
