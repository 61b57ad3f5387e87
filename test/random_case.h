// Random configurations over the whole contract.
#pragma once

#include "attention_case.h"
#include "random.h"

namespace single_query::test {

// Any configuration whose keys and values together have about `budget` elements at most; the seed alone decides it.
AttentionCase random_case(std::uint64_t seed, std::int64_t budget);

} // namespace single_query::test
