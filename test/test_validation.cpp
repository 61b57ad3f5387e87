// Bad arguments are refused by name before anything is written, by the device call and the host twin alike; odd but
// legal ones are not.
#include "refusal.h"
#include "validate.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace single_query::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

constexpr std::int64_t batch = 2;
constexpr std::int64_t query_heads = 4;
constexpr std::int64_t kv_heads = 2;
constexpr std::int64_t keys = 6;
constexpr std::int64_t head_dim = 8;

// A good problem with every argument present, its memory, and what it must not touch.
struct Fixture {
  std::vector<float> query = std::vector<float>(batch * query_heads * head_dim, 0.5f);
  std::vector<float> key = std::vector<float>(batch * kv_heads * keys * head_dim, 0.25f);
  std::vector<float> value = std::vector<float>(batch * kv_heads * keys * head_dim, 2.0f);
  std::vector<float> output = std::vector<float>(batch * query_heads * head_dim, -77.0f);
  std::vector<float> lse = std::vector<float>(batch * query_heads, -77.0f);
  std::vector<float> slopes = std::vector<float>(query_heads, 0.0f);
  std::vector<float> mask = std::vector<float>(batch * keys, 0.0f);
  std::vector<float> sinks = std::vector<float>(query_heads, 0.0f);
  std::vector<std::int32_t> lengths = {6, 3};
  std::vector<std::int32_t> page_table = {0, 1, 2, 3}; // [2, 2] of pages of 3 keys
  struct alignas(256) Block {
    std::array<std::byte, 256> bytes;
  };
  std::vector<Block> workspace = std::vector<Block>(64);
  AttentionProblem problem = contiguous_problem(DataType::float32, batch, query_heads, kv_heads, keys, head_dim);

  Fixture() {
    problem.query = query.data();
    problem.key = key.data();
    problem.value = value.data();
    problem.output = output.data();
    problem.lse = lse.data();
    problem.alibi_slopes = slopes.data();
    problem.attn_mask = mask.data();
    problem.mask_type = MaskType::float32;
    problem.mask_stride_batch = keys;
    problem.sinks = sinks.data();
    problem.lengths = lengths.data();
  }

  void use_pages() {
    problem.page_table = page_table.data();
    problem.page_table_stride_batch = 2;
    problem.page_table_stride_page = 1;
    problem.max_pages = 2;
    problem.page_size = 3;
    problem.pages = 4;
    problem.key_stride_page = problem.value_stride_page = kv_heads * 3 * head_dim;
    problem.key_stride_head = problem.value_stride_head = 3 * head_dim;
  }

  bool nothing_written() const {
    const auto untouched = [](float x) { return x == -77.0f; };
    return std::all_of(output.begin(), output.end(), untouched) && std::all_of(lse.begin(), lse.end(), untouched);
  }

  void run_on_host() { attention_on_host(problem, workspace.data(), workspace.size() * sizeof(Block)); }
};

struct BadInput {
  const char* argument;
  std::function<void(Fixture&)> spoil;
};

void expect_refusal(const char* argument, const std::string& message) {
  INFO("argument " << argument << ", message: " << message);
  CHECK(message.rfind("attention: " + std::string(argument) + " is ", 0) == 0);
  CHECK(message.find(": it") != std::string::npos);
}

void expect_all_refused(const std::vector<BadInput>& inputs) {
  for (const BadInput& bad : inputs) {
    Fixture fixture;
    bad.spoil(fixture);
    AttentionProblem& problem = fixture.problem;
    void* workspace = fixture.workspace.data();
    const std::size_t bytes = fixture.workspace.size() * sizeof(Fixture::Block);
    expect_refusal(bad.argument, refusal([&] { validate(problem); }));
    expect_refusal(bad.argument, refusal([&] { attention_on_host(problem, workspace, bytes); }));
    expect_refusal(bad.argument, refusal([&] { attention_on_host_workspace_bytes(problem); }));
    expect_refusal(bad.argument, refusal([&] { attention(problem, workspace, bytes, nullptr); }));
    expect_refusal(bad.argument, refusal([&] { attention_workspace_bytes(problem); }));
    CHECK(fixture.nothing_written());
  }
}

} // namespace

TEST_CASE("Bad sizes are refused by name") {
  expect_all_refused({
      {"dtype", [](Fixture& f) { f.problem.dtype = static_cast<DataType>(7); }},
      {"dtype", [](Fixture& f) { f.problem.dtype = static_cast<DataType>(-1); }},
      {"batch", [](Fixture& f) { f.problem.batch = f.problem.pages = -1; }},
      {"batch", [](Fixture& f) { f.problem.batch = largest; }},
      {"query_heads", [](Fixture& f) { f.problem.query_heads = -4; }},
      {"query_heads", [](Fixture& f) { f.problem.query_heads = 3; }},
      {"query_heads", [](Fixture& f) { f.problem.query_heads = 33; }},
      {"kv_heads", [](Fixture& f) { f.problem.kv_heads = 0; }},
      {"kv_heads", [](Fixture& f) { f.problem.kv_heads = -2; }},
      {"query_heads", [](Fixture& f) { f.problem.kv_heads = 8; }},
      {"head_dim", [](Fixture& f) { f.problem.head_dim = 0; }},
      {"head_dim", [](Fixture& f) { f.problem.head_dim = -8; }},
      {"head_dim", [](Fixture& f) { f.problem.head_dim = 257; }},
      {"page_size", [](Fixture& f) { f.problem.page_size = -1; }},
      {"page_size", [](Fixture& f) { f.problem.page_size = std::int64_t{1} << 31; }},
      {"pages", [](Fixture& f) { f.problem.pages = 3; }},
      {"pages", [](Fixture& f) { f.problem.pages = -1; }},
      {"max_pages", [](Fixture& f) { f.problem.max_pages = 2; }},
      {"max_pages", [](Fixture& f) { f.problem.max_pages = -1; }},
      {"lengths_type", [](Fixture& f) { f.problem.lengths_type = static_cast<LengthType>(2); }},
      {"mask_type", [](Fixture& f) { f.problem.mask_type = static_cast<MaskType>(4); }},
  });
}

TEST_CASE("Bad numbers are refused by name") {
  expect_all_refused({
      {"scale", [](Fixture& f) { f.problem.scale = not_a_number; }},
      {"scale", [](Fixture& f) { f.problem.scale = infinity; }},
      {"softcap", [](Fixture& f) { f.problem.softcap = -1; }},
      {"softcap", [](Fixture& f) { f.problem.softcap = not_a_number; }},
      {"softcap", [](Fixture& f) { f.problem.softcap = infinity; }},
      {"window", [](Fixture& f) { f.problem.window = -1; }},
      {"split_size", [](Fixture& f) { f.problem.split_size = -1; }},
  });
}

TEST_CASE("Null and misaligned pointers are refused by name") {
  const auto shifted = [](const void* pointer) {
    return static_cast<const void*>(static_cast<const char*>(pointer) + 2);
  };
  const auto shifted_floats = [](const float* pointer) {
    return reinterpret_cast<const float*>(reinterpret_cast<const char*>(pointer) + 2);
  };
  expect_all_refused({
      {"query", [](Fixture& f) { f.problem.query = nullptr; }},
      {"key", [](Fixture& f) { f.problem.key = nullptr; }},
      {"value", [](Fixture& f) { f.problem.value = nullptr; }},
      {"output", [](Fixture& f) { f.problem.output = nullptr; }},
      {"query", [&](Fixture& f) { f.problem.query = shifted(f.query.data()); }},
      {"key", [&](Fixture& f) { f.problem.key = shifted(f.key.data()); }},
      {"value", [&](Fixture& f) { f.problem.value = shifted(f.value.data()); }},
      {"output", [&](Fixture& f) { f.problem.output = const_cast<void*>(shifted(f.output.data())); }},
      {"lse", [&](Fixture& f) { f.problem.lse = const_cast<float*>(shifted_floats(f.lse.data())); }},
      {"alibi_slopes", [&](Fixture& f) { f.problem.alibi_slopes = shifted_floats(f.slopes.data()); }},
      {"sinks", [&](Fixture& f) { f.problem.sinks = shifted_floats(f.sinks.data()); }},
      {"attn_mask", [&](Fixture& f) { f.problem.attn_mask = shifted(f.mask.data()); }},
      {"lengths", [&](Fixture& f) { f.problem.lengths = shifted(f.lengths.data()); }},
  });
}

TEST_CASE("Negative strides, and extents past 64 bits, are refused by name") {
  std::vector<BadInput> inputs;
  const std::vector<std::pair<const char*, std::int64_t AttentionProblem::*>> strides = {
      {"query_stride_batch", &AttentionProblem::query_stride_batch},
      {"query_stride_head", &AttentionProblem::query_stride_head},
      {"output_stride_batch", &AttentionProblem::output_stride_batch},
      {"output_stride_head", &AttentionProblem::output_stride_head},
      {"lse_stride_batch", &AttentionProblem::lse_stride_batch},
      {"lse_stride_head", &AttentionProblem::lse_stride_head},
      {"key_stride_page", &AttentionProblem::key_stride_page},
      {"key_stride_head", &AttentionProblem::key_stride_head},
      {"key_stride_slot", &AttentionProblem::key_stride_slot},
      {"value_stride_page", &AttentionProblem::value_stride_page},
      {"value_stride_head", &AttentionProblem::value_stride_head},
      {"value_stride_slot", &AttentionProblem::value_stride_slot},
      {"lengths_stride", &AttentionProblem::lengths_stride},
      {"alibi_stride_batch", &AttentionProblem::alibi_stride_batch},
      {"alibi_stride_head", &AttentionProblem::alibi_stride_head},
      {"mask_stride_batch", &AttentionProblem::mask_stride_batch},
      {"mask_stride_head", &AttentionProblem::mask_stride_head},
      {"mask_stride_key", &AttentionProblem::mask_stride_key},
      {"sinks_stride", &AttentionProblem::sinks_stride},
  };
  for (const auto& [name, stride] : strides) {
    inputs.push_back({name, [stride = stride](Fixture& f) { f.problem.*stride = -1; }});
    inputs.push_back({name, [stride = stride](Fixture& f) { f.problem.*stride = largest; }}); // in bytes
  }
  inputs.push_back({"key", [](Fixture& f) { f.problem.key_stride_slot = largest / 16; }}); // times 5 keys
  inputs.push_back(
      {"value", [](Fixture& f) { f.problem.value_stride_head = f.problem.value_stride_page = largest / 6; }});
  expect_all_refused(inputs);
}

TEST_CASE("A page table without lengths, and bad page tables, are refused by name") {
  expect_all_refused({
      {"lengths",
       [](Fixture& f) {
         f.use_pages();
         f.problem.lengths = nullptr;
       }},
      {"page_size",
       [](Fixture& f) {
         f.use_pages();
         f.problem.page_size = 0;
       }},
      {"max_pages",
       [](Fixture& f) {
         f.use_pages();
         f.problem.max_pages = std::int64_t{1} << 30;
       }},
      {"max_pages",
       [](Fixture& f) {
         f.use_pages();
         f.problem.max_pages = largest;
       }},
      {"max_pages",
       [](Fixture& f) {
         f.use_pages();
         f.problem.max_pages = -1;
       }},
      {"pages",
       [](Fixture& f) {
         f.use_pages();
         f.problem.pages = -1;
       }},
      {"page_table_stride_batch",
       [](Fixture& f) {
         f.use_pages();
         f.problem.page_table_stride_batch = -1;
       }},
      {"page_table_stride_page",
       [](Fixture& f) {
         f.use_pages();
         f.problem.page_table_stride_page = -1;
       }},
      {"page_table",
       [](Fixture& f) {
         f.use_pages();
         f.problem.page_table = reinterpret_cast<const std::int32_t*>(reinterpret_cast<char*>(f.page_table.data()) + 1);
       }},
  });
}

TEST_CASE("A48: an output or lse that overlaps an input, the other, or itself is refused by name") {
  expect_all_refused({
      {"output", [](Fixture& f) { f.problem.output = f.query.data(); }},
      {"output", [](Fixture& f) { f.problem.output = f.query.data() + f.query.size() - 1; }},
      {"output", [](Fixture& f) { f.problem.output = f.key.data() + 7; }},
      {"output", [](Fixture& f) { f.problem.output = f.value.data(); }},
      {"output", [](Fixture& f) { f.problem.output = f.lengths.data(); }},
      {"output", [](Fixture& f) { f.problem.output = f.mask.data(); }},
      {"output", [](Fixture& f) { f.problem.output = f.slopes.data(); }},
      {"output", [](Fixture& f) { f.problem.output = f.sinks.data(); }},
      {"output", [](Fixture& f) { f.problem.lse = f.output.data(); }},
      {"lse", [](Fixture& f) { f.problem.lse = f.query.data() + 3; }},
      {"lse", [](Fixture& f) { f.problem.lse = f.sinks.data(); }},
      {"output", [](Fixture& f) { f.problem.output_stride_batch = 0; }},
      {"output", [](Fixture& f) { f.problem.output_stride_head = head_dim - 1; }},
      {"lse", [](Fixture& f) { f.problem.lse_stride_head = 0; }},
      {"lse", [](Fixture& f) { f.problem.lse_stride_batch = query_heads - 1; }},
      {"output",
       [](Fixture& f) {
         f.use_pages();
         f.problem.output = f.page_table.data();
       }},
  });
}

TEST_CASE("A workspace that is too small, null, misaligned or shared is refused by name") {
  Fixture fixture;
  const std::size_t bytes = attention_on_host_workspace_bytes(fixture.problem);
  REQUIRE(bytes > 0);
  const auto call = [&](void* workspace, std::size_t given) {
    return refusal([&] { attention_on_host(fixture.problem, workspace, given); });
  };
  expect_refusal("workspace_bytes", call(fixture.workspace.data(), bytes - 1));
  expect_refusal("workspace", call(nullptr, bytes));
  expect_refusal("workspace", call(fixture.workspace.data()->bytes.data() + 1, bytes));
  std::vector<Fixture::Block> both(64);
  fixture.problem.output = both.data();
  expect_refusal("workspace", call(both.data(), bytes));
  CHECK(fixture.nothing_written());
}

TEST_CASE("After a refusal the next good call works") {
  Fixture fixture;
  fixture.problem.scale = not_a_number;
  CHECK_FALSE(refusal([&] { fixture.run_on_host(); }).empty());
  fixture.problem.scale = 1;
  CHECK(refusal([&] { fixture.run_on_host(); }).empty());
  // The sink of 0 takes part beside keys of one score each.
  const float score = 0.5f * 0.25f * head_dim;
  for (std::int64_t row = 0; row < batch * query_heads; ++row) {
    const double sum = (row < query_heads ? 6 : 3) * std::exp(static_cast<double>(score));
    CHECK(std::fabs(fixture.output[static_cast<std::size_t>(row * head_dim)] - 2 * sum / (sum + 1)) < 1e-6);
  }
}

TEST_CASE("Odd but legal problems are not refused") {
  const std::vector<std::function<void(Fixture&)>> legal = {
      [](Fixture&) {},
      [](Fixture& f) { f.use_pages(); },
      [](Fixture& f) { f.problem.scale = -1; },
      [](Fixture& f) { f.problem.scale = 0; },
      [](Fixture& f) { f.problem.window = largest; },
      [](Fixture& f) { f.problem.split_size = largest; },
      [](Fixture& f) { f.problem.split_size = 1; },
      // Inputs may share memory, and be expanded.
      [](Fixture& f) {
        f.problem.key = f.problem.value = f.query.data();
        f.problem.page_size = f.problem.mask_stride_batch = 1;
        f.problem.key_stride_page = f.problem.value_stride_page = kv_heads * head_dim;
        f.problem.key_stride_head = f.problem.value_stride_head = head_dim;
      },
      [](Fixture& f) { f.problem.key_stride_page = f.problem.key_stride_head = f.problem.key_stride_slot = 0; },
      [](Fixture& f) { f.problem.query_stride_batch = f.problem.query_stride_head = 0; },
      // No key: nothing to point to.
      [](Fixture& f) { f.problem.page_size = 0, f.problem.key = f.problem.value = nullptr; },
      [](Fixture& f) { f.use_pages(), f.problem.pages = 0, f.problem.key = f.problem.value = nullptr; },
      [](Fixture& f) { f.use_pages(), f.problem.max_pages = 0; },
      // No row: nothing to point to at all.
      [](Fixture& f) { f.problem.batch = f.problem.pages = 0, f.problem.output = nullptr, f.problem.query = nullptr; },
      [](Fixture& f) { f.problem.query_heads = 0, f.problem.output = nullptr, f.problem.query = nullptr; },
      [](Fixture& f) { f.problem.query_heads = f.problem.kv_heads = 0, f.problem.key = nullptr; },
      // Strides of axes of one index are never multiplied with anything.
      [](Fixture& f) {
        f.problem.batch = f.problem.pages = 1;
        f.problem.query_stride_batch = f.problem.output_stride_batch = f.problem.key_stride_page = largest;
        f.problem.lse_stride_batch = f.problem.mask_stride_batch = f.problem.lengths_stride = largest;
      },
      // Optional tensors that are absent: their fields take no part.
      [](Fixture& f) { f.problem.attn_mask = nullptr, f.problem.mask_type = static_cast<MaskType>(9); },
      [](Fixture& f) { f.problem.lengths = nullptr, f.problem.lengths_type = static_cast<LengthType>(9); },
      [](Fixture& f) { f.problem.lse = nullptr, f.problem.lse_stride_head = -1; },
      // The output in the gaps of the query.
      [](Fixture& f) {
        f.query.resize(2 * batch * query_heads * head_dim);
        f.problem.query = f.query.data();
        f.problem.output = f.query.data() + head_dim;
        f.problem.query_stride_head = f.problem.output_stride_head = 2 * head_dim;
        f.problem.query_stride_batch = f.problem.output_stride_batch = 2 * query_heads * head_dim;
      },
      // Heads outside batches.
      [](Fixture& f) { f.problem.output_stride_batch = head_dim, f.problem.output_stride_head = batch * head_dim; },
  };
  for (std::size_t i = 0; i < legal.size(); ++i) {
    Fixture fixture;
    legal[i](fixture);
    INFO("problem " << i);
    CHECK(refusal([&] { fixture.run_on_host(); }) == "");
  }
}

TEST_CASE("Problems without rows write nothing") {
  for (const bool no_batch : {true, false}) {
    Fixture fixture;
    fixture.problem.batch = fixture.problem.pages = no_batch ? 0 : batch;
    fixture.problem.query_heads = no_batch ? query_heads : 0;
    CHECK(attention_on_host_workspace_bytes(fixture.problem) == 0);
    attention_on_host(fixture.problem, nullptr, 0);
    CHECK(fixture.nothing_written());
  }
}

} // namespace single_query::test
