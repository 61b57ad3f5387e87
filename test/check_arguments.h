// Random argument structs, legal and illegal, against what the header says of them.
#pragma once

#include <cstdint>
#include <string>

namespace single_query::test {

struct ArgumentCounts {
  std::int64_t refused = 0;
  std::int64_t computed = 0;
  std::int64_t accepted_only = 0; // legal, but their memory is not ours or their work too much
};

// One struct and one call of the host twin, the device calls too if it is refused; every third is a merge. A legal one
// has to be computed within its own memory, an illegal one refused by the name of an argument that is at fault, with
// nothing written. Empty if so, otherwise what was wrong. Only under AddressSanitizer are stray reads found.
std::string check_random_arguments(std::uint64_t seed, ArgumentCounts& counts);

} // namespace single_query::test
