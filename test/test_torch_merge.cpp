// merge() over tensors: any axes between the parts and head_dim, and refusals by name.
#include "torch_case.h"

namespace single_query::test {

TEST_ON_EACH_DEVICE("Merging the parts of a cache gives attention over all of it, whatever the axes between") {
  const TensorCase c;
  const Tensors tensors = random_tensors(c, torch_device(device));
  const auto [expected, expected_lse] = expected_attention(tensors, {});
  std::vector<at::Tensor> outputs, lses;
  const std::vector<std::int64_t> cuts = {0, 1, 1, 20, 37}; // an empty part too
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    const auto [output, lse] = attention_with_lse(tensors.query, tensors.key.slice(2, cuts[i], cuts[i + 1]),
                                                  tensors.value.slice(2, cuts[i], cuts[i + 1]));
    outputs.push_back(output);
    lses.push_back(lse);
  }
  outputs[1].fill_(std::nan(""));                                                 // it counts nothing
  const at::Tensor parts = torch::stack(outputs), parts_lse = torch::stack(lses); // [P, B, Hq, D], [P, B, Hq]
  const auto whole = merge(parts, parts_lse);
  const at::Tensor& output = std::get<0>(whole);
  const at::Tensor& lse = std::get<1>(whole);
  CHECK(close(output, expected));
  CHECK(close(lse, expected_lse));

  const auto same = [&](const std::tuple<at::Tensor, at::Tensor>& merged, at::IntArrayRef sizes) {
    CHECK(std::get<1>(merged).sizes() == sizes);
    CHECK(same_bits(std::get<0>(merged).reshape(output.sizes()), output));
    CHECK(same_bits(std::get<1>(merged).reshape(lse.sizes()), lse));
  };
  same(merge(parts.flatten(1, 2), parts_lse.flatten(1, 2)), {8});
  same(merge(parts.view({4, 1, 2, 2, 1, 2, 24}), parts_lse.view({4, 1, 2, 2, 1, 2})), {1, 2, 2, 1, 2});
  same(merge(laid_out(parts, {2, 1, 0, 3}, 1, 1), laid_out(parts_lse, {1, 2, 0}, 1, 1)), {2, 4});
  same(merge(parts, laid_out(parts_lse, {2, 1, 0}, 0, 0)), {2, 4}); // axes that collapse in one of the two only
  same(merge(laid_out(parts, {2, 1, 0, 3}, 0, 0), parts_lse), {2, 4});
  const auto [single, single_lse] = merge(parts.select(1, 1).select(1, 2), parts_lse.select(1, 1).select(1, 2));
  CHECK(single_lse.dim() == 0);
  CHECK(same_bits(single, output[1][2]));
  const auto [empty, empty_lse] = merge(parts.slice(1, 0, 0), parts_lse.slice(1, 0, 0));
  CHECK(empty.sizes() == at::IntArrayRef({0, 4, 24}));
  CHECK(empty_lse.sizes() == at::IntArrayRef({0, 4}));
  const auto [none, none_lse] = merge(parts.slice(0, 1, 2), parts_lse.slice(0, 1, 2));
  CHECK(none.eq(0).all().item<bool>());
  CHECK(none_lse.eq(-INFINITY).all().item<bool>());
}

TEST_ON_EACH_DEVICE("Bad arguments of merge are refused by name") {
  const at::Device where = torch_device(device);
  const auto tensor = [&](at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
    return torch::zeros(sizes, torch::dtype(type).device(where));
  };
  struct BadMerge {
    at::Tensor outputs;
    at::Tensor lse;
    const char* name;
    const char* value;
  };
  const at::Tensor outputs = tensor({3, 2, 4, 24}), lse = tensor({3, 2, 4});
  const std::vector<BadMerge> table = {
      {at::Tensor(), lse, "outputs", "undefined"},
      {outputs, at::Tensor(), "lse", "undefined"},
      {outputs.to(at::kDouble), lse, "outputs", "Double"},
      {outputs, lse.to(at::kHalf), "lse", "Half"},
      {tensor({24}), tensor({}), "outputs", "1 axes"},
      {outputs, lse[0], "lse", "2 axes"},
      {outputs, tensor({2, 2, 4}), "lse", "[2, 2, 4]"},
      {outputs, tensor({3, 2, 5}), "lse", "[3, 2, 5]"},
      {tensor({3, 2, 24, 4}).transpose(2, 3), lse, "outputs", "stride 4"},
      {tensor({3, 2, 4, 0}), lse, "head_dim", "0"},
      {tensor({3, 2, 4, 300}), lse, "head_dim", "300"},
      {tensor({3, 5, 6, 7, 24}).permute({0, 3, 2, 1, 4}), tensor({3, 7, 6, 5}), "outputs", "strides"},
      {tensor({3, 2, 4, 24}).requires_grad_(true), lse, "outputs", "grad"},
      {outputs, tensor({3, 2, 4}).requires_grad_(true), "lse", "grad"},
  };
  for (const BadMerge& bad : table) {
    const std::string message = error_of([&] { merge(bad.outputs, bad.lse); });
    INFO(bad.name << ", " << bad.value << ": " << message);
    CHECK(message.find(bad.name) != std::string::npos);
    CHECK(message.find(bad.value) != std::string::npos);
  }
  CHECK(std::get<1>(merge(outputs, lse)).sizes() == at::IntArrayRef({2, 4}));
}

} // namespace single_query::test
