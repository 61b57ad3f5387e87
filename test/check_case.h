// Everything that has to hold of one configuration, on one device.
#pragma once

#include "placement.h"

namespace single_query::test {

// 16-bit dtypes may round their softmax weights on the tensor cores, and nowhere else.
inline Weights weights_on(Device device, DataType dtype) {
  return device == Device::cuda && dtype != DataType::float32 ? Weights::rounded : Weights::float32;
}

// Against double; nothing but the results written; and the same bits again, whatever the outputs and the scratch held,
// without the log-sum-exp, with the work shared out otherwise (host) and replayed from a graph (CUDA).
// The comparison's failure says what did not hold.
Comparison check(const AttentionData& data, Device device);
Comparison check(const AttentionCase& attention_case, Device device);

} // namespace single_query::test
