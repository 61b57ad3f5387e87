// Which keys a row attends to, and where they lie: lengths, window and pages. Host and device.
#pragma once

#include "single_query/attention.h"
#include "softmax_state.h"

namespace single_query {

// Of one element; the type has been validated.
SINGLE_QUERY_HOST_DEVICE std::int64_t bytes_of(DataType type) {
  return type == DataType::float32 ? 4 : 2;
}

// Keys begin .. end - 1 of a row. Past 2^31 only as an intermediate value, hence unsigned.
struct KeyRange {
  std::uint32_t begin;
  std::uint32_t end;
};

SINGLE_QUERY_HOST_DEVICE bool is_in(const KeyRange& keys, std::uint32_t key) {
  return key - keys.begin < keys.end - keys.begin;
}

// Keys a row can have at most: what is allocated for it.
SINGLE_QUERY_HOST_DEVICE std::int64_t capacity(const AttentionProblem& problem) {
  return problem.max_pages * problem.page_size;
}

// Length of row `batch`, read where the lengths are, clamped to what is allocated.
SINGLE_QUERY_HOST_DEVICE std::uint32_t row_length(const AttentionProblem& problem, std::int64_t batch) {
  const std::int64_t limit = capacity(problem);
  if (problem.lengths == nullptr) {
    return static_cast<std::uint32_t>(limit);
  }
  const std::int64_t at = batch * problem.lengths_stride;
  const std::int64_t length = problem.lengths_type == LengthType::int32
                                  ? static_cast<const std::int32_t*>(problem.lengths)[at]
                                  : static_cast<const std::int64_t*>(problem.lengths)[at];
  return static_cast<std::uint32_t>(length < 0 ? 0 : length > limit ? limit : length);
}

// The newest `window` keys of a row of `length` keys; all of them without a window.
SINGLE_QUERY_HOST_DEVICE KeyRange attended_keys(const AttentionProblem& problem, std::uint32_t length) {
  const bool windowed = problem.window > 0 && problem.window < static_cast<std::int64_t>(length);
  return {windowed ? length - static_cast<std::uint32_t>(problem.window) : 0u, length};
}

// Where a key lies. A page outside [0, pages) must not be followed.
struct KeySlot {
  std::int32_t page;
  std::uint32_t slot;
};

SINGLE_QUERY_HOST_DEVICE KeySlot key_slot(const AttentionProblem& problem, std::int64_t batch, std::uint32_t key) {
  if (problem.page_table == nullptr) {
    return {static_cast<std::int32_t>(batch), key};
  }
  const std::uint32_t page_size = static_cast<std::uint32_t>(problem.page_size);
  const std::uint32_t page = key / page_size;
  const std::int32_t entry =
      problem.page_table[batch * problem.page_table_stride_batch + page * problem.page_table_stride_page];
  return {entry, key - page * page_size};
}

SINGLE_QUERY_HOST_DEVICE bool page_exists(const AttentionProblem& problem, std::int64_t page) {
  return page >= 0 && page < problem.pages;
}

} // namespace single_query
