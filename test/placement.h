// The tensors of a case in the memory of a device, ready to be called on as often as wanted.
#pragma once

#include "attention_data.h"
#include "device.h"
#include "tolerance.h"

namespace single_query::test {

class Placement {
public:
  Placement(const AttentionData& data, Device device);

  Device device() const { return device_; }
  const AttentionData& data() const { return *data_; }
  AttentionProblem problem; // over this placement's memory; a test may change what it likes

  // Outputs and log-sum-exps back to poison, gaps and guards included.
  void poison_results(Fill fill);
  // A tensor of the case once more, after the test changed it there.
  void upload(Tensor tensor);
  // What the rows hold now. Throws std::runtime_error where anything else was written: an input, a gap, a guard.
  Result results() const;

private:
  const AttentionData* data_;
  Device device_;
  PerTensor<Memory> memory_;
  PerTensor<GuardedBuffer> expected_; // what each tensor's memory holds unless a result was written there
};

// How one call is made.
struct Call {
  Fill scratch = Fill::nan;      // the host workspace's content
  ParallelFor parallel_for = {}; // of the host twin
};

// Calls attention on the placement's device, waits for it, and checks that nothing behind the workspace was touched.
void call(const AttentionProblem& problem, Device device, const Call& options = {});

// The stream and workspace that call() uses on CUDA, for tests that launch themselves.
Stream& shared_stream();
CudaWorkspace& shared_workspace();
// Launches without waiting.
void launch(const AttentionProblem& problem, const Stream& stream, CudaWorkspace& workspace);

// Places, poisons, calls, and reads back.
Result run(const AttentionData& data, Device device);

} // namespace single_query::test
