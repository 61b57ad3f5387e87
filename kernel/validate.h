// The only place that checks arguments, for the device calls and the host twins alike. Host only; nothing is allocated
// unless a check fails, and a failed one throws Error::Kind::invalid_argument with a message of the form
// "attention: query_heads is 3: it must be a multiple of kv_heads (2)".
#pragma once

#include "single_query/attention.h"

namespace single_query {

// Everything the host can know: sizes, enumerators, numbers, pointers (null, or not aligned to an element), strides,
// extents that do not fit into 64 bits, and an output or lse that overlaps an input, the other, or itself. What
// `lengths` and `page_table` hold is not looked at.
void validate(const AttentionProblem& problem);
void validate(const MergeProblem& problem);

// For a split size that makes more splits than a workspace of 64 bits could hold.
[[noreturn]] void refuse_splits(const AttentionProblem& problem);

// `given` bytes at `workspace`, of which `needed` are needed. Where none are, any pointer does.
void validate_workspace(const void* workspace, std::size_t given, std::size_t needed, std::size_t alignment);

// The same, and the workspace shares no memory with what the problem reads and writes.
void validate_workspace(const AttentionProblem& problem, const void* workspace, std::size_t given, std::size_t needed,
                        std::size_t alignment);

} // namespace single_query
