// The double reference on the GPU, for problems in its memory.
#pragma once

#include "reference.h"

namespace single_query::test {

// As reference(): the same bodies of the three loops, shared out over threads. Waits for the device.
Reference reference_on_device(const AttentionProblem& problem);

} // namespace single_query::test
