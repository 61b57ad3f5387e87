// Bad arguments of merge are refused by name before anything is written, on the device and on the host.
#include "refusal.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace single_query::test {
namespace {

constexpr std::int64_t batch = 2;
constexpr std::int64_t heads = 4;
constexpr std::int64_t head_dim = 8;
constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

struct MergeFixture {
  std::vector<float> outputs = std::vector<float>(3 * batch * heads * head_dim, 1.0f);
  std::vector<float> lse = std::vector<float>(3 * batch * heads, 0.0f);
  std::vector<float> output = std::vector<float>(batch * heads * head_dim, -77.0f);
  std::vector<float> output_lse = std::vector<float>(batch * heads, -77.0f);
  MergeProblem problem;

  MergeFixture() {
    problem.parts = 3;
    problem.batch = batch;
    problem.heads = heads;
    problem.head_dim = head_dim;
    problem.outputs = outputs.data();
    problem.outputs_stride_head = problem.output_stride_head = head_dim;
    problem.outputs_stride_batch = problem.output_stride_batch = heads * head_dim;
    problem.outputs_stride_part = batch * heads * head_dim;
    problem.lse = lse.data();
    problem.lse_stride_head = problem.output_lse_stride_head = 1;
    problem.lse_stride_batch = problem.output_lse_stride_batch = heads;
    problem.lse_stride_part = batch * heads;
    problem.output = output.data();
    problem.output_lse = output_lse.data();
  }
};

} // namespace

TEST_CASE("Bad arguments of merge are refused by name") {
  struct Bad {
    const char* argument;
    std::function<void(MergeFixture&)> spoil;
  };
  const std::vector<Bad> inputs = {
      {"dtype", [](MergeFixture& f) { f.problem.dtype = static_cast<DataType>(3); }},
      {"parts", [](MergeFixture& f) { f.problem.parts = -1; }},
      {"batch", [](MergeFixture& f) { f.problem.batch = -1; }},
      {"heads", [](MergeFixture& f) { f.problem.heads = -1; }},
      {"head_dim", [](MergeFixture& f) { f.problem.head_dim = 0; }},
      {"head_dim", [](MergeFixture& f) { f.problem.head_dim = 257; }},
      {"outputs", [](MergeFixture& f) { f.problem.outputs = nullptr; }},
      {"lse", [](MergeFixture& f) { f.problem.lse = nullptr; }},
      {"output", [](MergeFixture& f) { f.problem.output = nullptr; }},
      {"outputs_stride_part", [](MergeFixture& f) { f.problem.outputs_stride_part = -1; }},
      {"lse_stride_part", [](MergeFixture& f) { f.problem.lse_stride_part = -1; }},
      {"output_lse_stride_head", [](MergeFixture& f) { f.problem.output_lse_stride_head = -1; }},
      {"outputs", [](MergeFixture& f) { f.problem.outputs_stride_part = largest / 8; }},
      {"output", [](MergeFixture& f) { f.problem.output = f.outputs.data() + 5; }},
      {"output", [](MergeFixture& f) { f.problem.output = f.lse.data(); }},
      {"output", [](MergeFixture& f) { f.problem.output_stride_head = 0; }},
      {"output_lse", [](MergeFixture& f) { f.problem.output_lse = f.lse.data(); }},
      {"output_lse", [](MergeFixture& f) { f.problem.output_lse_stride_batch = 1; }},
  };
  for (const Bad& bad : inputs) {
    MergeFixture fixture;
    bad.spoil(fixture);
    for (const std::string& message :
         {refusal([&] { merge_on_host(fixture.problem); }), refusal([&] { merge(fixture.problem, nullptr); })}) {
      INFO("argument " << bad.argument << ", message: " << message);
      CHECK(message.rfind("merge: " + std::string(bad.argument) + " is ", 0) == 0);
    }
    CHECK(std::count(fixture.output.begin(), fixture.output.end(), -77.0f) == batch * heads * head_dim);
    CHECK(std::count(fixture.output_lse.begin(), fixture.output_lse.end(), -77.0f) == batch * heads);
  }
}

TEST_CASE("A merge of no parts, or of no rows, is not refused") {
  MergeFixture fixture;
  fixture.problem.parts = 0;
  fixture.problem.outputs = fixture.problem.lse = nullptr;
  merge_on_host(fixture.problem);
  CHECK(fixture.output == std::vector<float>(fixture.output.size(), 0.0f));
  CHECK(fixture.output_lse == std::vector<float>(fixture.output_lse.size(), -std::numeric_limits<float>::infinity()));
  fixture.problem.batch = 0;
  fixture.problem.output = nullptr;
  CHECK(refusal([&] { merge_on_host(fixture.problem); }) == "");
}

} // namespace single_query::test
