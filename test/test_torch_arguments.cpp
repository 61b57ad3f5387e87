// Bad arguments are refused by name, before anything is written, and the next good call works.
#include "torch_case.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <limits>

namespace single_query::test {
namespace {

// The arguments of one call, good as they are; a bad case changes one thing.
struct Arguments {
  explicit Arguments(at::Device where) : device(where) {
    const TensorCase c;
    auto tensors = random_tensors(c, device);
    query = tensors.query;
    key = tensors.key;
    value = tensors.value;
    out = torch::full_like(query, -1.0f);
  }
  at::Tensor tensor(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) const {
    return torch::zeros(sizes, torch::dtype(type).device(device));
  }
  void make_paged() { // pools [6, Hkv, 10, D], 4 pages per row
    key = tensor({6, 2, 10, 24});
    value = tensor({6, 2, 10, 24});
    options.page_table = tensor({2, 4}, at::kInt);
    options.lengths = tensor({2}, at::kInt);
  }

  at::Device device;
  at::Tensor query; // [2, 4, 24]
  at::Tensor key;   // [2, 2, 37, 24]
  at::Tensor value; // [2, 2, 37, 24]
  AttentionOptions options;
  at::Tensor out;
};

struct BadCase {
  const char* what;
  std::function<void(Arguments&)> spoil;
  std::vector<const char*> mentions; // the argument's name first
};

const double infinity = std::numeric_limits<double>::infinity();
const double nan = std::numeric_limits<double>::quiet_NaN();

std::vector<BadCase> bad_tensors() {
  return {
      {"undefined query", [](Arguments& c) { c.query = at::Tensor(); }, {"query", "undefined"}},
      {"undefined key", [](Arguments& c) { c.key = at::Tensor(); }, {"key", "undefined"}},
      {"undefined value", [](Arguments& c) { c.value = at::Tensor(); }, {"value", "undefined"}},
      {"double",
       [](Arguments& c) { c.query = c.query.to(at::kDouble); },
       {"query", "Double", "Float, Half or BFloat16"}},
      {"integers", [](Arguments& c) { c.query = c.query.to(at::kLong); }, {"query", "Long"}},
      {"key of another dtype", [](Arguments& c) { c.key = c.key.to(at::kHalf); }, {"key", "Half", "Float"}},
      {"value of another dtype",
       [](Arguments& c) { c.value = c.value.to(at::kBFloat16); },
       {"value", "BFloat16", "Float"}},
      {"query of 0 axes", [](Arguments& c) { c.query = c.tensor({}); }, {"query", "0 axes"}},
      {"query of 5 axes",
       [](Arguments& c) {
         c.query = c.tensor({1, 2, 4, 1, 24});
       },
       {"query", "5 axes"}},
      {"two queries",
       [](Arguments& c) {
         c.query = c.tensor({2, 4, 2, 24});
       },
       {"query", "2", "must have 1"}},
      {"[Hq, D] with [B, Hkv, N, D]", [](Arguments& c) { c.query = c.query[0]; }, {"key", "4 axes", "must have 3"}},
      {"[B, Hq, D] with [Hkv, N, D]", [](Arguments& c) { c.key = c.key[0]; }, {"key", "3 axes", "must have 4"}},
      {"key without value's axes", [](Arguments& c) { c.value = c.value[0]; }, {"value", "3 axes", "must have 4"}},
      {"another head_dim",
       [](Arguments& c) {
         c.key = c.tensor({2, 2, 37, 23});
       },
       {"key", "23", "24"}},
      {"another batch",
       [](Arguments& c) {
         c.key = c.tensor({1, 2, 37, 24});
       },
       {"key", "batch 1", "2"}},
      {"A46: more values than keys",
       [](Arguments& c) {
         c.value = c.tensor({2, 2, 38, 24});
       },
       {"value", "38", "37"}},
      {"more value heads",
       [](Arguments& c) {
         c.value = c.tensor({2, 4, 37, 24});
       },
       {"value", "[2, 4, 37, 24]"}},
      {"A27: heads no multiple",
       [](Arguments& c) {
         c.query = c.tensor({2, 3, 24});
       },
       {"query_heads", "3", "2"}},
      {"A47: head_dim 0",
       [](Arguments& c) {
         c.query = c.tensor({2, 4, 0});
         c.key = c.value = c.tensor({2, 2, 37, 0});
       },
       {"head_dim", "0", "256"}},
      {"head_dim 257",
       [](Arguments& c) {
         c.query = c.tensor({2, 4, 257});
         c.key = c.value = c.tensor({2, 2, 37, 257});
       },
       {"head_dim", "257", "256"}},
      {"query's last axis",
       [](Arguments& c) {
         c.query = c.tensor({2, 4, 48}).slice(2, 0, 48, 2);
       },
       {"query", "stride 2"}},
      {"key's last axis",
       [](Arguments& c) {
         c.key = c.tensor({2, 2, 24, 37}).transpose(2, 3);
       },
       {"key", "stride 37"}},
      {"value's last axis",
       [](Arguments& c) {
         c.value = c.tensor({1}).expand({2, 2, 37, 24});
       },
       {"value", "stride 0"}},
      {"query that requires grad", [](Arguments& c) { c.query.requires_grad_(true); }, {"query", "grad"}},
      {"key that requires grad", [](Arguments& c) { c.key.requires_grad_(true); }, {"key", "grad"}},
      {"value that requires grad", [](Arguments& c) { c.value.requires_grad_(true); }, {"value", "grad"}},
      {"sparse query", [](Arguments& c) { c.query = c.query.to_sparse(); }, {"Sparse"}},
  };
}

std::vector<BadCase> bad_options() {
  return {
      {"undefined mask", [](Arguments& c) { c.options.attn_mask = at::Tensor(); }, {"attn_mask", "undefined"}},
      {"undefined lengths", [](Arguments& c) { c.options.lengths = at::Tensor(); }, {"lengths", "undefined"}},
      {"integer mask",
       [](Arguments& c) { c.options.attn_mask = c.tensor({37}, at::kInt); },
       {"attn_mask", "Int", "Bool"}},
      {"mask of a third dtype",
       [](Arguments& c) { c.options.attn_mask = c.tensor({37}, at::kHalf); },
       {"attn_mask", "Half", "Float"}},
      {"mask of 5 axes",
       [](Arguments& c) {
         c.options.attn_mask = c.tensor({1, 1, 1, 1, 37});
       },
       {"attn_mask", "5 axes"}},
      {"mask of 36 keys", [](Arguments& c) { c.options.attn_mask = c.tensor({36}); }, {"attn_mask", "36", "37"}},
      {"mask of 3 heads",
       [](Arguments& c) {
         c.options.attn_mask = c.tensor({3, 37});
       },
       {"attn_mask", "3", "4"}},
      {"mask of 3 rows",
       [](Arguments& c) {
         c.options.attn_mask = c.tensor({3, 1, 37});
       },
       {"attn_mask", "3", "2"}},
      {"mask of 2 queries",
       [](Arguments& c) {
         c.options.attn_mask = c.tensor({2, 4, 2, 37});
       },
       {"attn_mask", "axis 2"}},
      {"mask that requires grad",
       [](Arguments& c) { c.options.attn_mask = c.tensor({37}).requires_grad_(true); },
       {"attn_mask", "grad"}},
      {"scale nan", [](Arguments& c) { c.options.scale = nan; }, {"scale", "nan", "finite"}},
      {"scale inf", [](Arguments& c) { c.options.scale = -infinity; }, {"scale", "inf", "finite"}},
      {"scale past float32", [](Arguments& c) { c.options.scale = 1e39; }, {"scale", "1e+39", "finite"}},
      {"softcap negative", [](Arguments& c) { c.options.softcap = -1; }, {"softcap", "-1"}},
      {"softcap nan", [](Arguments& c) { c.options.softcap = nan; }, {"softcap", "nan"}},
      {"softcap that rounds to off", [](Arguments& c) { c.options.softcap = 1e-60; }, {"softcap", "1e-60"}},
      {"window 0", [](Arguments& c) { c.options.window = 0; }, {"window", "0", "1 or more"}},
      {"window negative", [](Arguments& c) { c.options.window = -5; }, {"window", "-5", "1 or more"}},
      {"split_size 0", [](Arguments& c) { c.options.split_size = 0; }, {"split_size", "0", "1 or more"}},
      {"split_size negative", [](Arguments& c) { c.options.split_size = -64; }, {"split_size", "-64"}},
      {"lengths of 3 rows", [](Arguments& c) { c.options.lengths = c.tensor({3}, at::kInt); }, {"lengths", "3", "2"}},
      {"lengths of 2 axes",
       [](Arguments& c) {
         c.options.lengths = c.tensor({2, 1}, at::kInt);
       },
       {"lengths", "2 axes"}},
      {"A29: lengths of int16",
       [](Arguments& c) { c.options.lengths = c.tensor({2}, at::kShort); },
       {"lengths", "Short"}},
      {"float lengths", [](Arguments& c) { c.options.lengths = c.tensor({2}); }, {"lengths", "Float"}},
      {"slopes of 3 heads", [](Arguments& c) { c.options.alibi_slopes = c.tensor({3}); }, {"alibi_slopes", "3", "4"}},
      {"slopes of 1 row",
       [](Arguments& c) {
         c.options.alibi_slopes = c.tensor({1, 4});
       },
       {"alibi_slopes", "[1, 4]"}},
      {"slopes of 3 axes",
       [](Arguments& c) {
         c.options.alibi_slopes = c.tensor({1, 2, 4});
       },
       {"alibi_slopes", "3 axes"}},
      {"half slopes",
       [](Arguments& c) { c.options.alibi_slopes = c.tensor({4}, at::kHalf); },
       {"alibi_slopes", "Half"}},
      {"sinks of 3 heads", [](Arguments& c) { c.options.sinks = c.tensor({3}); }, {"sinks", "3", "4"}},
      {"sinks of 2 axes",
       [](Arguments& c) {
         c.options.sinks = c.tensor({2, 4});
       },
       {"sinks", "2 axes"}},
      {"double sinks", [](Arguments& c) { c.options.sinks = c.tensor({4}, at::kDouble); }, {"sinks", "Double"}},
      {"page_table without lengths",
       [](Arguments& c) {
         c.make_paged();
         c.options.lengths = {};
       },
       {"lengths", "page_table"}},
      {"page_table of int64",
       [](Arguments& c) {
         c.make_paged();
         c.options.page_table = c.tensor({2, 4}, at::kLong);
       },
       {"page_table", "Long", "Int"}},
      {"page_table of 1 axis",
       [](Arguments& c) {
         c.make_paged();
         c.options.page_table = c.tensor({4}, at::kInt);
       },
       {"page_table", "1 axes"}},
      {"page_table of 3 rows",
       [](Arguments& c) {
         c.make_paged();
         c.options.page_table = c.tensor({3, 4}, at::kInt);
       },
       {"page_table", "3", "2"}},
      {"pages of no slots",
       [](Arguments& c) {
         c.make_paged();
         c.key = c.value = c.tensor({6, 2, 0, 24});
       },
       {"page_size", "0"}},
      {"pages without a batch axis",
       [](Arguments& c) {
         c.make_paged();
         c.query = c.query[0];
         c.key = c.value = c.key[0];
         c.options.page_table = c.tensor({1, 4}, at::kInt);
         c.options.lengths = c.tensor({1}, at::kInt);
       },
       {"query", "page_table"}},
      {"mask of a part of the pages",
       [](Arguments& c) {
         c.make_paged();
         c.options.attn_mask = c.tensor({37});
       },
       {"attn_mask", "37", "40"}},
  };
}

std::vector<BadCase> bad_outputs() {
  return {
      {"undefined out", [](Arguments& c) { c.out = at::Tensor(); }, {"out", "undefined"}},
      {"out of another dtype",
       [](Arguments& c) {
         c.out = c.tensor({2, 4, 24}, at::kHalf);
       },
       {"out", "Half", "Float"}},
      {"out of another rank",
       [](Arguments& c) {
         c.out = c.tensor({2, 4, 1, 24});
       },
       {"out", "4 axes"}},
      {"out of another shape",
       [](Arguments& c) {
         c.out = c.tensor({2, 5, 24});
       },
       {"out", "[2, 5, 24]", "[2, 4, 24]"}},
      {"out's last axis",
       [](Arguments& c) {
         c.out = c.tensor({2, 4, 48}).slice(2, 0, 48, 2);
       },
       {"out", "stride 2"}},
      {"out that overlaps itself",
       [](Arguments& c) {
         c.out = c.tensor({1, 4, 24}).expand({2, 4, 24});
       },
       {" out ", "overlap"}},
      {"A48: out is query", [](Arguments& c) { c.out = c.query; }, {" out ", "query"}},
      {"A48: out in key",
       [](Arguments& c) {
         c.key = c.value = c.tensor({2, 4, 37, 24});
         c.out = c.key.select(2, 0);
       },
       {" out ", "key"}},
      {"A48: out partly in value",
       [](Arguments& c) {
         const at::Tensor storage = c.tensor({2 * 2 * 37 * 24 + 100});
         c.value = storage.slice(0, 0, 2 * 2 * 37 * 24).view({2, 2, 37, 24});
         c.out = storage.slice(0, storage.size(0) - 192).view({2, 4, 24});
       },
       {" out ", "value"}},
      {"out in attn_mask",
       [](Arguments& c) {
         c.options.attn_mask = c.tensor({2, 4, 37});
         c.out = c.options.attn_mask->slice(2, 0, 24);
       },
       {" out ", "attn_mask"}},
      {"out that requires grad", [](Arguments& c) { c.out.requires_grad_(true); }, {"out", "grad"}},
  };
}

void expect_mention(const std::string& message, const BadCase& bad) {
  INFO(bad.what << ": " << message);
  CHECK_FALSE(message.empty());
  for (const char* word : bad.mentions) {
    INFO(word);
    CHECK(message.find(word) != std::string::npos);
  }
}

void expect_good_call(const Arguments& good) {
  CHECK(close(attention(good.query, good.key, good.value),
              std::get<0>(expected_attention({good.query, good.key, good.value}, {}))));
}

} // namespace

TEST_ON_EACH_DEVICE("Bad tensors and options are refused by name in every overload") {
  const Arguments good(torch_device(device));
  for (const std::vector<BadCase>& table : {bad_tensors(), bad_options()}) {
    for (const BadCase& bad : table) {
      Arguments c(good.device);
      bad.spoil(c);
      if (c.query.defined()) {
        c.out = torch::full(c.query.sizes(), -1.0f, c.out.options());
      }
      expect_mention(error_of([&] { attention(c.query, c.key, c.value, c.options); }), bad);
      expect_mention(error_of([&] { attention_with_lse(c.query, c.key, c.value, c.options); }), bad);
      expect_mention(error_of([&] { attention_out(c.out, c.query, c.key, c.value, c.options); }), bad);
      CHECK(c.out.eq(-1.0f).all().item<bool>());
    }
  }
  expect_good_call(good);
}

TEST_ON_EACH_DEVICE("A bad out is refused by that name, and not written") {
  const Arguments good(torch_device(device));
  for (const BadCase& bad : bad_outputs()) {
    Arguments c(good.device);
    bad.spoil(c);
    const at::Tensor before = c.out.defined() ? c.out.detach().clone() : at::Tensor();
    expect_mention(error_of([&] { attention_out(c.out, c.query, c.key, c.value, c.options); }), bad);
    CHECK((!c.out.defined() || torch::equal(c.out, before)));
  }
  expect_good_call(good);
}

TEST_CASE("Tensors on another device than the query's are refused by name", "[gpu]") {
  const Arguments host(at::kCPU);
  const Arguments device(at::kCUDA);
  const auto expect = [](const std::string& message, const char* name) {
    INFO(message);
    CHECK(message.find(std::string(name) + " is on ") != std::string::npos);
    CHECK(message.find("cpu") != std::string::npos);
    CHECK(message.find("cuda:0") != std::string::npos);
  };
  expect(error_of([&] { attention(device.query, host.key, device.value); }), "key");
  expect(error_of([&] { attention(host.query, device.key, host.value); }), "key");
  expect(error_of([&] { attention(device.query, device.key, host.value); }), "value");
  at::Tensor out = host.out;
  expect(error_of([&] { attention_out(out, device.query, device.key, device.value); }), "out");
  AttentionOptions options;
  options.lengths = host.tensor({2}, at::kLong);
  expect(error_of([&] { attention(device.query, device.key, device.value, options); }), "lengths");
  options = {};
  options.attn_mask = host.tensor({37});
  expect(error_of([&] { attention(device.query, device.key, device.value, options); }), "attn_mask");
  options = {};
  options.sinks = device.tensor({4});
  expect(error_of([&] { attention(host.query, host.key, host.value, options); }), "sinks");
  expect(error_of([&] { merge(device.tensor({2, 4, 8}), host.tensor({2, 4})); }), "lse");
}

} // namespace single_query::test
