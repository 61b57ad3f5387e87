// The LibTorch layer: shapes, layouts and options reach the raw interface as they are meant, on the CPU and on CUDA.
#include "torch_case.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <thread>

namespace single_query::test {
namespace {

// Rows of 5, 0, 37 and 20 keys with every option at once, which must be within their rights.
AttentionOptions every_option(const TensorCase& c, at::Device device) {
  torch::manual_seed(2);
  AttentionOptions options;
  options.attn_mask = torch::randn({c.batch, c.query_heads, c.keys}).to(device);
  options.attn_mask->index_put_({0, 1}, -INFINITY); // a row without any key
  options.scale = -0.3;
  options.lengths = torch::tensor({5, 0, 37, 20}, at::kLong).slice(0, 0, c.batch).to(device);
  options.window = 11;
  options.softcap = 3.0;
  options.alibi_slopes = torch::rand({c.batch, c.query_heads}).to(device);
  options.sinks = torch::randn({c.query_heads}).to(device);
  options.split_size = 8;
  return options;
}

} // namespace

TEST_ON_EACH_DEVICE("Every dtype and layout of tensors agrees with LibTorch in double") {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const std::int64_t head_dim : {1, 24, 45, 128}) {
      TensorCase c;
      c.dtype = dtype;
      c.head_dim = head_dim;
      const Tensors dense = random_tensors(c, torch_device(device));
      const auto [expected, expected_lse] = expected_attention(dense, {});
      INFO(dtype << ", head_dim " << head_dim);
      const at::Tensor output = attention(dense.query, dense.key, dense.value);
      CHECK(output.is_contiguous());
      CHECK(close(output, expected));
      // [B, N, Hkv, D] under key, [Hkv, N, B, D] under value, heads before batch under query; odd gaps and offsets.
      const Tensors strided = {laid_out(dense.query, {1, 0, 2}, 3, 1), laid_out(dense.key, {0, 2, 1, 3}, 1, 1),
                               laid_out(dense.value, {1, 2, 0, 3}, 5, 2)};
      const auto [strided_output, strided_lse] = attention_with_lse(strided.query, strided.key, strided.value);
      CHECK(close(strided_output, expected));
      CHECK(close(strided_lse, expected_lse));
      CHECK(strided_output.is_contiguous());
    }
  }
}

TEST_ON_EACH_DEVICE("Queries of one to four axes give the same bits, in their own shape") {
  const TensorCase c;
  const auto [query, key, value] = random_tensors(c, torch_device(device));
  const auto [output, lse] = attention_with_lse(query, key, value);
  CHECK(output.sizes() == query.sizes());
  CHECK(lse.sizes() == at::IntArrayRef({c.batch, c.query_heads}));
  CHECK(lse.scalar_type() == at::kFloat);

  const auto [with_position, position_lse] = attention_with_lse(query.unsqueeze(2), key, value);
  CHECK(with_position.sizes() == at::IntArrayRef({c.batch, c.query_heads, 1, c.head_dim}));
  CHECK(position_lse.sizes() == at::IntArrayRef({c.batch, c.query_heads, 1}));
  CHECK(same_bits(with_position.squeeze(2), output));
  CHECK(same_bits(position_lse.squeeze(2), lse));

  AttentionOptions options;
  options.split_size = 64; // the same plan for one row as for all
  const at::Tensor planned = attention(query, key, value, options);
  const auto [one_row, row_lse] = attention_with_lse(query[1], key[1], value[1], options);
  CHECK(row_lse.sizes() == at::IntArrayRef({c.query_heads}));
  CHECK(same_bits(one_row, planned[1]));
  const auto [one_head, head_lse] = attention_with_lse(query[1][3], key[1][1], value[1][1], options);
  CHECK(head_lse.dim() == 0);
  CHECK(one_head.sizes() == at::IntArrayRef({c.head_dim}));
  CHECK(close(one_head, planned[1][3]));
}

TEST_ON_EACH_DEVICE("All overloads, directly and through the dispatcher, give the same bits") {
  const TensorCase c;
  const Tensors tensors = random_tensors(c, torch_device(device));
  const at::Tensor &query = tensors.query, &key = tensors.key, &value = tensors.value;
  const AttentionOptions o = every_option(c, query.device());
  const at::Tensor output = attention(query, key, value, o);
  CHECK(same_bits(std::get<0>(attention_with_lse(query, key, value, o)), output));
  at::Tensor out = torch::full_like(query, std::nan(""));
  CHECK(attention_out(out, query, key, value, o).is_same(out));
  CHECK(same_bits(out, output));

  const auto call = [&](const char* overload, std::vector<c10::IValue> out_argument) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("single_query::attention", overload);
    torch::jit::Stack stack = {query,        key,      value,     o.attn_mask,    o.scale, o.lengths,
                               o.page_table, o.window, o.softcap, o.alibi_slopes, o.sinks, o.split_size};
    stack.insert(stack.end(), out_argument.begin(), out_argument.end());
    op.callBoxed(stack);
    return stack.back().toTensor();
  };
  CHECK(same_bits(call("", {}), output));
  out.fill_(std::nan(""));
  CHECK(call("out", {out}).is_same(out));
  CHECK(same_bits(out, output));
}

TEST_ON_EACH_DEVICE("Every option at once agrees with LibTorch in double") {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    TensorCase c;
    c.batch = 4;
    c.dtype = dtype;
    const Tensors tensors = random_tensors(c, torch_device(device));
    AttentionOptions options = every_option(c, tensors.query.device());
    const auto [expected, expected_lse] = expected_attention(tensors, options);
    const auto [output, lse] = attention_with_lse(tensors.query, tensors.key, tensors.value, options);
    INFO(dtype);
    CHECK(close(output, expected));
    CHECK(close(lse, expected_lse));
    options.lengths = options.lengths->to(at::kInt);
    CHECK(same_bits(attention(tensors.query, tensors.key, tensors.value, options), output));
  }
}

TEST_ON_EACH_DEVICE("A paged cache in either order of axes gives the bits of the contiguous one") {
  TensorCase c;
  c.keys = 48;
  const Tensors tensors = random_tensors(c, torch_device(device));
  constexpr std::int64_t page_size = 16;
  const std::int64_t pages_per_row = c.keys / page_size;
  AttentionOptions options;
  options.lengths = torch::tensor({48, 21}, at::kInt).to(tensors.query.device());
  options.split_size = 16;
  const at::Tensor output = attention(tensors.query, tensors.key, tensors.value, options);

  // Row b's page i is page order[b, i] of the pool, every other page of which holds NaN; unused entries name none.
  at::Tensor page_table = torch::tensor({{5, 0, 3}, {6, 2, -7}}, at::kInt).to(tensors.query.device());
  const auto pool = [&](const at::Tensor& cache, at::IntArrayRef order) {
    at::Tensor pages = torch::full({7, c.kv_heads, page_size, c.head_dim}, std::nan(""), cache.options());
    for (std::int64_t row = 0; row < c.batch; ++row) {
      for (std::int64_t i = 0; i < pages_per_row; ++i) {
        if (const std::int64_t page = page_table[row][i].item<std::int64_t>(); page >= 0) {
          pages[page].copy_(cache[row].slice(1, i * page_size, (i + 1) * page_size));
        }
      }
    }
    return laid_out(pages, order, 0, 0);
  };
  for (const std::vector<std::int64_t>& order : std::vector<std::vector<std::int64_t>>{{0, 1, 2, 3}, {0, 2, 1, 3}}) {
    const at::Tensor key = pool(tensors.key, order), value = pool(tensors.value, order);
    options.page_table = page_table;
    CHECK(same_bits(attention(tensors.query, key, value, options), output));
    CHECK(same_bits(attention(tensors.query.unsqueeze(2), key, value, options).squeeze(2), output));
    options.page_table = page_table.t().contiguous().t();
    CHECK(same_bits(attention(tensors.query, key, value, options), output));
  }
}

TEST_ON_EACH_DEVICE("A mask of any rank and dtype is broadcast, never expanded by the caller") {
  TensorCase c;
  c.dtype = at::kHalf;
  const Tensors tensors = random_tensors(c, torch_device(device));
  torch::manual_seed(3);
  const std::vector<std::vector<std::int64_t>> shapes = {{},
                                                         {1},
                                                         {c.keys},
                                                         {1, c.keys},
                                                         {c.query_heads, c.keys},
                                                         {c.query_heads, 1},
                                                         {1, 1, c.keys},
                                                         {c.batch, 1, c.keys},
                                                         {1, c.query_heads, c.keys},
                                                         {c.batch, c.query_heads, c.keys},
                                                         {c.batch, 1, 1}};
  for (const at::ScalarType dtype : {at::kBool, at::kHalf, at::kFloat}) {
    for (const std::vector<std::int64_t>& shape : shapes) {
      at::Tensor mask = torch::randn(shape);
      mask = (dtype == at::kBool ? mask > -0.5 : mask).to(dtype).to(tensors.query.device());
      const at::Tensor expanded = mask.expand({c.batch, c.query_heads, c.keys}).contiguous();
      AttentionOptions options;
      options.attn_mask = expanded;
      const at::Tensor expected = attention(tensors.query, tensors.key, tensors.value, options);
      INFO(dtype << " mask of " << at::IntArrayRef(shape));
      CHECK(close(expected, std::get<0>(expected_attention(tensors, options))));
      options.attn_mask = mask;
      CHECK(same_bits(attention(tensors.query, tensors.key, tensors.value, options), expected));
      CHECK(same_bits(attention(tensors.query.unsqueeze(2), tensors.key, tensors.value, options).squeeze(2), expected));
      if (mask.dim() == 3) {
        options.attn_mask = mask.unsqueeze(2);
        CHECK(same_bits(attention(tensors.query, tensors.key, tensors.value, options), expected));
      }
      options.attn_mask = laid_out(expanded.to(at::kFloat), {2, 0, 1}, 1, 1).to(dtype);
      CHECK(same_bits(attention(tensors.query, tensors.key, tensors.value, options), expected));
    }
  }
}

TEST_ON_EACH_DEVICE("Expanded tensors and axes of one element with any stride are read as they are meant") {
  TensorCase c;
  c.batch = 1;
  c.kv_heads = 1;
  const auto [query, key, value] = random_tensors(c, torch_device(device));
  const at::Tensor output = attention(query, key, value);
  const at::Tensor odd_key = key.as_strided(key.sizes(), {7, 5, key.stride(2), 1});
  const at::Tensor odd_query = query.as_strided(query.sizes(), {3, query.stride(1), 1});
  CHECK(same_bits(attention(odd_query, odd_key, value), output));

  AttentionOptions options;
  options.split_size = 64;
  options.lengths = torch::full({1}, 20, at::kInt).to(query.device()).expand({3});
  const at::Tensor rows =
      attention(query.expand({3, -1, -1}), key.expand({3, 4, -1, -1}), value.expand({3, 4, -1, -1}), options);
  CHECK(same_bits(rows[0], rows[2]));
  CHECK(close(rows[1], attention(query, key.slice(2, 0, 20), value.slice(2, 0, 20))[0]));

  const at::Tensor column = torch::randn({2, 4, 6}).to(query.device()).slice(2, 0, 1); // head_dim 1, stride 6 below it
  const at::Tensor cache = torch::randn({2, 4, 9, 5}).to(query.device()).slice(3, 2, 3);
  CHECK(same_bits(attention(column, cache, cache),
                  attention(column.contiguous(), cache.contiguous(), cache.contiguous())));
}

TEST_ON_EACH_DEVICE("out may have any strides, is the only thing written, and counts as modified") {
  const TensorCase c;
  const auto [query, key, value] = random_tensors(c, torch_device(device));
  at::Tensor whole = torch::full({c.query_heads, c.batch, 2 * c.head_dim}, -1.0f, query.options());
  at::Tensor out = whole.transpose(0, 1).slice(2, 3, 3 + c.head_dim);
  const auto version = out.unsafeGetTensorImpl()->version_counter().current_version();
  attention_out(out, query, key, value);
  CHECK(out.unsafeGetTensorImpl()->version_counter().current_version() > version);
  CHECK(same_bits(out, attention(query, key, value)));
  out.fill_(-1.0f);
  CHECK(whole.eq(-1.0f).all().item<bool>());
}

TEST_ON_EACH_DEVICE("Sizes of zero give empty results, and no keys give zero and -inf") {
  for (const auto& [batch, heads, keys] :
       std::vector<std::array<std::int64_t, 3>>{{0, 4, 5}, {2, 0, 5}, {2, 4, 0}, {0, 0, 0}}) {
    TensorCase c;
    c.batch = batch;
    c.query_heads = c.kv_heads = heads;
    c.keys = keys;
    const auto [query, key, value] = random_tensors(c, torch_device(device));
    AttentionOptions options;
    options.attn_mask = torch::ones({batch, heads, keys}, at::kBool).to(query.device());
    options.sinks = torch::full({heads}, -INFINITY).to(query.device());
    options.lengths = torch::full({batch}, 3, at::kLong).to(query.device());
    for (const AttentionOptions& some : {AttentionOptions{}, options}) {
      const auto [output, lse] = attention_with_lse(query, key, value, some);
      CHECK(output.sizes() == query.sizes());
      CHECK(lse.sizes() == at::IntArrayRef({batch, heads}));
      CHECK(output.eq(0).all().item<bool>());
      CHECK(lse.eq(-INFINITY).all().item<bool>());
    }
    options = {};
    options.lengths = torch::zeros({batch}, at::kInt).to(query.device());
    options.page_table = torch::zeros({batch, 0}, at::kInt).to(query.device());
    const at::Tensor pool = torch::zeros({0, heads, 16, c.head_dim}).to(query.device());
    CHECK(attention(query, pool, pool, options).eq(0).all().item<bool>());
  }
}

TEST_ON_EACH_DEVICE("With a split_size a row has the same bits in any batch, and it is the size that is used") {
  TensorCase c;
  c.batch = 3;
  c.keys = 20000;
  const auto [query, key, value] = random_tensors(c, torch_device(device));
  AttentionOptions options;
  options.split_size = 512;
  const at::Tensor together = attention(query, key, value, options);
  for (std::int64_t row = 0; row < c.batch; ++row) {
    CHECK(same_bits(attention(query[row], key[row], value[row], options), together[row]));
  }
  options.split_size = c.keys; // one split rounds otherwise than many
  CHECK_FALSE(same_bits(attention(query, key, value, options), together));
}

TEST_ON_EACH_DEVICE("Grad mode is as it was, and inputs that require grad are welcome while it is off") {
  Tensors tensors = random_tensors({}, torch_device(device));
  at::Tensor &query = tensors.query, &key = tensors.key, &value = tensors.value;
  const at::Tensor expected = attention(query, key, value);
  query.requires_grad_(true);
  {
    const at::NoGradGuard no_grad;
    CHECK(same_bits(attention(query, key, value), expected));
    CHECK_FALSE(at::GradMode::is_enabled());
  }
  CHECK_FALSE(error_of([&] { attention(query, key, value); }).empty());
  CHECK(at::GradMode::is_enabled());
  const c10::InferenceMode inference;
  at::Tensor out = torch::empty_like(key.select(2, 0).repeat({1, 2, 1}));
  CHECK(same_bits(attention_out(out, query.detach(), key, value), expected));
}

TEST_ON_EACH_DEVICE("Any number of host threads may call at once") {
  TensorCase c;
  c.keys = 3000;
  const Tensors tensors = random_tensors(c, torch_device(device));
  const at::Tensor &query = tensors.query, &key = tensors.key, &value = tensors.value;
  const at::Tensor expected = attention(query, key, value);
  std::vector<at::Tensor> results(4);
  std::vector<std::thread> threads;
  threads.reserve(results.size());
  for (at::Tensor& result : results) {
    threads.emplace_back([&] {
      for (int call = 0; call < 20; ++call) {
        result = attention(query, key, value);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const at::Tensor& result : results) {
    CHECK(same_bits(result, expected));
  }
}

TEST_CASE("The CPU result does not depend on the number of threads") {
  TensorCase c;
  c.keys = 20000;
  const auto [query, key, value] = random_tensors(c, at::kCPU);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor expected = attention(query, key, value);
  for (const int count : {2, 3, 7}) {
    at::set_num_threads(count);
    CHECK(same_bits(attention(query, key, value), expected));
  }
  at::set_num_threads(threads);
}

TEST_CASE("Meta tensors get the shapes and dtypes, and the refusals, of real ones") {
  TensorCase c;
  c.dtype = at::kHalf;
  const Tensors tensors = random_tensors(c, at::kMeta);
  const at::Tensor &query = tensors.query, &key = tensors.key, &value = tensors.value;
  const auto [output, lse] = attention_with_lse(query, key, value);
  CHECK(output.is_meta());
  CHECK(output.sizes() == query.sizes());
  CHECK(output.scalar_type() == at::kHalf);
  CHECK(lse.sizes() == at::IntArrayRef({c.batch, c.query_heads}));
  CHECK(lse.scalar_type() == at::kFloat);
  CHECK(attention(query.unsqueeze(2), key, value).dim() == 4);
  at::Tensor out = torch::empty_like(query);
  CHECK(attention_out(out, query, key, value).is_same(out));
  const auto [merged, merged_lse] = merge(torch::empty({3, 5, 7, 9}, at::kMeta), torch::empty({3, 5, 7}, at::kMeta));
  CHECK(merged.sizes() == at::IntArrayRef({5, 7, 9}));
  CHECK(merged_lse.sizes() == at::IntArrayRef({5, 7}));
  const at::Tensor short_value = value.slice(2, 0, 3);
  CHECK(error_of([&] { attention(query, key, short_value); }).find("value has shape") != std::string::npos);
}

} // namespace single_query::test
