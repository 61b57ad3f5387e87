// Which of the host kernels this processor runs.
#include "host_kernels_cpu.h"

namespace single_query {

const HostKernels& host_kernels() {
#if defined(__x86_64__)
  static const HostKernels& best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                                       ? avx512_host_kernels
                                   : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                       ? avx2_host_kernels
                                       : baseline_host_kernels;
  return best;
#else
  return baseline_host_kernels;
#endif
}

} // namespace single_query
