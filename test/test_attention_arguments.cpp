// Structs of random content with at least one certain fault are always refused, before anything is read or written.
#include "each_device.h"

#include <limits>
#include <vector>

namespace single_query::test {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();

using Spoil = std::function<void(AttentionProblem&)>;

// Each makes any problem wrong, whatever else is changed in it.
const std::vector<Spoil> certain_faults = {
    [](AttentionProblem& p) { p.batch = -1; },
    [](AttentionProblem& p) { p.batch = least; },
    [](AttentionProblem& p) { p.query_heads = -4; },
    [](AttentionProblem& p) { p.query_heads = most; },
    [](AttentionProblem& p) { p.kv_heads = -2; },
    [](AttentionProblem& p) { p.head_dim = 0; },
    [](AttentionProblem& p) { p.head_dim = 257; },
    [](AttentionProblem& p) { p.head_dim = least; },
    [](AttentionProblem& p) { p.page_size = -1; },
    [](AttentionProblem& p) { p.page_size = most; },
    [](AttentionProblem& p) { p.max_pages = -1; },
    [](AttentionProblem& p) { p.pages = least; },
    [](AttentionProblem& p) { p.scale = NAN; },
    [](AttentionProblem& p) { p.scale = -INFINITY; },
    [](AttentionProblem& p) { p.softcap = -1; },
    [](AttentionProblem& p) { p.softcap = NAN; },
    [](AttentionProblem& p) { p.window = -1; },
    [](AttentionProblem& p) { p.split_size = least; },
    [](AttentionProblem& p) { p.dtype = static_cast<DataType>(7); },
};

// These as well, as long as the sizes are left alone.
const std::vector<Spoil> faults_of_tensors = {
    [](AttentionProblem& p) { p.kv_heads = 3; },
    [](AttentionProblem& p) { p.query = nullptr; },
    [](AttentionProblem& p) { p.key = nullptr; },
    [](AttentionProblem& p) { p.value = nullptr; },
    [](AttentionProblem& p) { p.output = nullptr; },
    [](AttentionProblem& p) { p.output_stride_batch = 0; },
    [](AttentionProblem& p) { p.output_stride_head = -8; },
    [](AttentionProblem& p) { p.lse_stride_batch = 0; },
    [](AttentionProblem& p) { p.query_stride_batch = least; },
    [](AttentionProblem& p) { p.key_stride_page = most; },
    [](AttentionProblem& p) { p.key_stride_head = -1; },
    [](AttentionProblem& p) { p.value_stride_slot = most / 2; },
    [](AttentionProblem& p) { p.alibi_stride_head = -1; },
    [](AttentionProblem& p) { p.mask_stride_key = most; },
    [](AttentionProblem& p) { p.sinks_stride = most; },
    [](AttentionProblem& p) { p.lengths_stride = most; },
    [](AttentionProblem& p) {
      p.lengths = nullptr;
      p.page_table = reinterpret_cast<const std::int32_t*>(p.sinks);
    },
    [](AttentionProblem& p) { p.output = const_cast<void*>(p.query); },
    [](AttentionProblem& p) { p.lse = static_cast<float*>(p.output); },
    [](AttentionProblem& p) { p.key = static_cast<const char*>(p.key) + 1; },
    [](AttentionProblem& p) { p.lengths = static_cast<const char*>(p.lengths) + 1; },
    [](AttentionProblem& p) { p.attn_mask = static_cast<const char*>(p.attn_mask) + 1; },
    [](AttentionProblem& p) { p.mask_type = static_cast<MaskType>(9); },
    [](AttentionProblem& p) { p.lengths_type = static_cast<LengthType>(2); },
};

// Anything at all in anything else: nothing of it may be followed.
void add_noise(Random& random, AttentionProblem& p, bool sizes) {
  const auto number = [&] {
    return random.one_of<std::int64_t>({0, 1, 2, -1, 8, 1 << 20, std::int64_t{1} << 31, std::int64_t{1} << 40,
                                        std::int64_t{1} << 62, most, most - 1, least,
                                        static_cast<std::int64_t>(random.bits())});
  };
  for (std::int64_t* stride : {&p.query_stride_batch,
                               &p.query_stride_head,
                               &p.key_stride_page,
                               &p.key_stride_head,
                               &p.key_stride_slot,
                               &p.value_stride_page,
                               &p.value_stride_head,
                               &p.value_stride_slot,
                               &p.page_table_stride_batch,
                               &p.page_table_stride_page,
                               &p.lengths_stride,
                               &p.alibi_stride_batch,
                               &p.alibi_stride_head,
                               &p.mask_stride_batch,
                               &p.mask_stride_head,
                               &p.mask_stride_key,
                               &p.sinks_stride,
                               &p.lse_stride_batch,
                               &p.lse_stride_head,
                               &p.window,
                               &p.split_size}) {
    *stride = random.chance(0.2) ? number() : *stride;
  }
  for (std::int64_t* size :
       {&p.batch, &p.query_heads, &p.kv_heads, &p.head_dim, &p.pages, &p.page_size, &p.max_pages}) {
    *size = sizes && random.chance(0.3) ? number() : *size;
  }
  const auto pointer = [&] { return reinterpret_cast<const void*>(random.one_of<std::uintptr_t>({0, 1, 8, ~15ull})); };
  for (const void** data : {&p.query, &p.key, &p.value}) {
    *data = sizes && random.chance(0.2) ? pointer() : *data;
  }
}

void expect_refused(const AttentionProblem& problem, Device device) {
  const auto refused = [&](const auto& function) {
    try {
      function();
    } catch (const Error& error) {
      return error.kind() == Error::Kind::invalid_argument;
    }
    return false;
  };
  static std::vector<std::byte> workspace(1 << 16);
  if (device == Device::cpu) {
    CHECK(refused([&] { attention_on_host(problem, workspace.data(), workspace.size()); }));
    CHECK(refused([&] { static_cast<void>(attention_on_host_workspace_bytes(problem)); }));
  } else {
    CHECK(refused([&] { attention(problem, shared_workspace().at_least(1 << 16), 1 << 16, shared_stream().get()); }));
    CHECK(refused([&] { static_cast<void>(attention_workspace_bytes(problem)); }));
  }
}

} // namespace

TEST_ON_EACH_DEVICE("Random structs with a certain fault are refused") {
  for (const char* paging : {"", " page_size=2 page_table=bp"}) {
    const AttentionData data(parse_case(std::string("batch=3 query_heads=4 kv_heads=2 keys=5 head_dim=8 lengths=b "
                                                    "alibi=bh sinks=h mask=bhk mask_type=float32") +
                                        paging));
    Placement placement(data, device);
    placement.poison_results(Fill::nan);
    Random random(11);
    for (int i = 0; i < 20000; ++i) {
      AttentionProblem problem = placement.problem;
      const bool sizes = random.chance(0.5);
      const std::vector<Spoil>& faults = sizes ? certain_faults : faults_of_tensors;
      const std::size_t fault = random.bits() % faults.size();
      if (random.chance(0.8)) {
        add_noise(random, problem, sizes);
      }
      faults[fault](problem);
      INFO((sizes ? "certain fault " : "fault of a tensor ") << fault << ", number " << i);
      expect_refused(problem, device);
    }
    CHECK_NOTHROW(placement.results()); // inputs, gaps and guards as they were
  }
}

TEST_CASE("Random merges with a certain fault are refused, on the CPU") {
  std::vector<float> memory(1000);
  MergeProblem good;
  good.parts = 2;
  good.batch = 3;
  good.heads = 2;
  good.head_dim = 8;
  good.outputs = memory.data();
  good.outputs_stride_part = 48;
  good.outputs_stride_batch = 16;
  good.outputs_stride_head = 8;
  good.lse = memory.data() + 100;
  good.lse_stride_part = 6;
  good.lse_stride_batch = 2;
  good.lse_stride_head = 1;
  good.output = memory.data() + 200;
  good.output_stride_batch = 16;
  good.output_stride_head = 8;
  good.output_lse = memory.data() + 300;
  good.output_lse_stride_batch = 2;
  good.output_lse_stride_head = 1;
  CHECK_NOTHROW(merge_on_host(good));
  const std::vector<std::function<void(MergeProblem&)>> faults = {
      [](MergeProblem& p) { p.parts = -1; },
      [](MergeProblem& p) { p.batch = least; },
      [](MergeProblem& p) { p.heads = most; },
      [](MergeProblem& p) { p.head_dim = 0; },
      [](MergeProblem& p) { p.head_dim = 257; },
      [](MergeProblem& p) { p.outputs = nullptr; },
      [](MergeProblem& p) { p.lse = nullptr; },
      [](MergeProblem& p) { p.output = nullptr; },
      [](MergeProblem& p) { p.output = const_cast<void*>(p.outputs); },
      [](MergeProblem& p) { p.output_lse = const_cast<float*>(p.lse); },
      [](MergeProblem& p) { p.output_lse = static_cast<float*>(p.output) + 3; },
      [](MergeProblem& p) { p.output_stride_batch = 0; },
      [](MergeProblem& p) { p.output_stride_head = 7; },
      [](MergeProblem& p) { p.outputs_stride_part = most; },
      [](MergeProblem& p) { p.lse_stride_part = -1; },
      [](MergeProblem& p) { p.dtype = static_cast<DataType>(3); },
      [](MergeProblem& p) { p.outputs = static_cast<const char*>(p.outputs) + 1; },
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    MergeProblem bad = good;
    faults[i](bad);
    INFO("fault " << i);
    CHECK_THROWS_AS(merge_on_host(bad), Error);
  }
}

} // namespace single_query::test
