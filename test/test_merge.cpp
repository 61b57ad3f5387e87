// merge gives attention over the union of the parts' keys.
#include "each_device.h"
#include "merge_case.h"

#include <cstring>
#include <vector>

namespace single_query::test {
namespace {

const std::vector<DataType> dtypes = {DataType::float32, DataType::float16, DataType::bfloat16};

void expect_merged(const MergeData& data, Device device) {
  const Result result = data.run(device);
  const Comparison comparison = compare(result, data.reference(), data.merge_case().dtype, Weights::float32);
  const MergeCase& c = data.merge_case();
  INFO("dtype " << static_cast<int>(c.dtype) << ", parts " << c.parts << ", batch " << c.batch << ", heads " << c.heads
                << ", head_dim " << c.head_dim);
  INFO(comparison.failure);
  CHECK(comparison.passed());
  for (const ParallelFor& parallel_for : {one_by_one(), threads(3)}) {
    CHECK(same_rows(result, 0, data.run(device, parallel_for), 0, result.rows));
  }
}

MergeCase sized(DataType dtype, std::int64_t parts, std::int64_t batch, std::int64_t heads, std::int64_t head_dim) {
  MergeCase c;
  c.dtype = dtype;
  c.parts = parts;
  c.batch = batch;
  c.heads = heads;
  c.head_dim = head_dim;
  return c;
}

} // namespace

TEST_ON_EACH_DEVICE("Merging agrees with double") {
  for (const DataType dtype : dtypes) {
    for (const std::int64_t parts : {0, 1, 2, 3, 8, 33, 500}) {
      for (const std::int64_t head_dim : {1, 7, 64, 77, 128, 256}) {
        expect_merged(MergeData(sized(dtype, parts, 2, 3, head_dim)), device);
      }
    }
  }
}

TEST_ON_EACH_DEVICE("Merging takes any strides") {
  for (const DataType dtype : dtypes) {
    for (const Layout& outputs :
         {Layout{"bhp"}, Layout{"hpb", "", 3, 1}, Layout{"pbh", "p"}, Layout{"bph", "", 8, 2}}) {
      MergeCase c = sized(dtype, 4, 3, 5, 40);
      c.outputs = outputs;
      c.lse = {"hbp", "", 1, 1};
      c.output = {"hb", "", 24, 3};
      c.output_lse = {"hb", "", 2, 1};
      expect_merged(MergeData(c), device);
    }
  }
}

TEST_ON_EACH_DEVICE("Merging without a log-sum-exp gives the same output bits") {
  for (const DataType dtype : dtypes) {
    MergeCase c = sized(dtype, 5, 2, 3, 70);
    const Result expected = MergeData(c).run(device);
    c.output_lse = {};
    CHECK(MergeData(c).run(device).output == expected.output);
  }
}

TEST_ON_EACH_DEVICE("Merging many rows agrees with double") {
  expect_merged(MergeData(sized(DataType::float32, 2, 70000, 1, 2)), device);
  expect_merged(MergeData(sized(DataType::float16, 3, 1, 66000, 1)), device);
  expect_merged(MergeData(sized(DataType::bfloat16, 2, 0, 4, 64)), device);
  expect_merged(MergeData(sized(DataType::bfloat16, 2, 4, 0, 64)), device);
}

TEST_ON_EACH_DEVICE("However many equal parts are merged, they agree with double") {
  for (const std::int64_t parts : {64, 100'000}) {
    MergeData data(sized(DataType::float32, parts, 1, 1, 3));
    for (std::int64_t part = 0; part < parts; ++part) {
      data.set_lse(part, 0, part == 0 ? 0.7f : 0.0f);
      for (std::int64_t d = 0; d < 3; ++d) {
        data.set_output(part, 0, d, data.output(0, 0, d));
      }
    }
    expect_merged(data, device);
    data.set_output(0, 0, 0, INFINITY);
    CHECK(output_at(data.run(device), 0) == INFINITY);
  }
}

TEST_ON_EACH_DEVICE("Log-sum-exps of any size merge") {
  for (const double spread : {0.0, 100.0, 1e6, 1e30}) {
    MergeCase c = sized(DataType::float32, 9, 2, 2, 64);
    c.lse_spread = spread;
    expect_merged(MergeData(c), device);
  }
}

TEST_ON_EACH_DEVICE("One part comes out bit for bit") {
  for (const DataType dtype : dtypes) {
    const MergeData data(sized(dtype, 1, 2, 2, 65));
    const Result result = data.run(device);
    for (std::int64_t row = 0; row < 4; ++row) {
      CHECK(result.lse[static_cast<std::size_t>(row)] == static_cast<float>(data.lse(0, row)));
      for (std::int64_t d = 0; d < 65; ++d) {
        CHECK(output_at(result, row, d) == data.output(0, row, d));
      }
    }
  }
}

TEST_ON_EACH_DEVICE("A02: two empty parts merge to an empty one, and an empty part changes no bit of the other") {
  for (const DataType dtype : dtypes) {
    for (const double content : {0.0, double(NAN), double(INFINITY)}) {
      MergeData data(sized(dtype, 2, 1, 1, 64));
      data.set_lse(0, 0, -INFINITY);
      for (std::int64_t d = 0; d < 64; ++d) {
        data.set_output(0, 0, d, content);
      }
      data.set_lse(1, 0, 0.5f);
      Result result = data.run(device);
      CHECK(result.lse[0] == 0.5f);
      for (std::int64_t d = 0; d < 64; ++d) {
        CHECK(output_at(result, 0, d) == data.output(1, 0, d));
      }
      data.set_lse(1, 0, -INFINITY);
      result = data.run(device);
      CHECK(result.lse[0] == -INFINITY);
      CHECK(output_at(result, 0) == 0);
      CHECK(output_at(result, 0, 63) == 0);
    }
  }
}

TEST_ON_EACH_DEVICE("NaN and infinity in a part that counts show in its row alone") {
  for (const DataType dtype : dtypes) {
    MergeData data(sized(dtype, 3, 1, 5, 16));
    data.set_lse(1, 0, NAN);
    data.set_lse(1, 1, INFINITY);
    data.set_output(2, 2, 3, NAN);
    data.set_output(2, 3, 4, -INFINITY);
    expect_merged(data, device);
    const Result result = data.run(device);
    CHECK(std::isnan(output_at(result, 0)));
    CHECK(std::isnan(output_at(result, 1)));
    CHECK(std::isnan(output_at(result, 2, 3)));
    CHECK(!std::isnan(output_at(result, 2, 4)));
    CHECK(output_at(result, 3, 4) == -INFINITY);
    CHECK(!std::isnan(output_at(result, 4)));
  }
}

TEST_ON_EACH_DEVICE("Parts at the end of the dtype's range merge to finite numbers") {
  for (const DataType dtype : dtypes) {
    MergeData data(sized(dtype, 100, 1, 2, 8));
    for (std::int64_t part = 0; part < 100; ++part) {
      for (std::int64_t d = 0; d < 8; ++d) {
        data.set_output(part, 0, d, format_of(dtype).largest);
        data.set_output(part, 1, d, -format_of(dtype).largest);
      }
    }
    expect_merged(data, device);
  }
}

namespace {

// Runs each part of the keys that `cuts` make by itself and merges them.
Result merged_parts(const AttentionData& data, Device device, const std::vector<std::int64_t>& cuts) {
  const AttentionCase& c = data.attention_case();
  const auto parts = static_cast<std::int64_t>(cuts.size()) - 1;
  MergeCase merge_case = sized(c.dtype, parts, c.batch, c.query_heads, c.head_dim);
  MergeData merge_data(merge_case);
  Placement placement(data, device);
  const AttentionProblem whole = placement.problem;
  const std::int64_t element_bytes = format_of(c.dtype).bytes;
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = cuts[static_cast<std::size_t>(part)];
    placement.poison_results(Fill::nan);
    placement.problem = whole;
    placement.problem.key = static_cast<const std::byte*>(whole.key) + begin * whole.key_stride_slot * element_bytes;
    placement.problem.value =
        static_cast<const std::byte*>(whole.value) + begin * whole.value_stride_slot * element_bytes;
    placement.problem.page_size = cuts[static_cast<std::size_t>(part) + 1] - begin;
    if (whole.attn_mask != nullptr) {
      placement.problem.attn_mask = static_cast<const std::byte*>(whole.attn_mask) + begin * whole.mask_stride_key;
    }
    call(placement.problem, device);
    const Result result = placement.results();
    for (std::int64_t row = 0; row < result.rows; ++row) {
      merge_data.set_lse(part, row, result.lse[static_cast<std::size_t>(row)]);
      for (std::int64_t d = 0; d < c.head_dim; ++d) {
        merge_data.set_output(part, row, d, output_at(result, row, d));
      }
    }
  }
  return merge_data.run(device);
}

} // namespace

TEST_ON_EACH_DEVICE("Keys cut anywhere, run by themselves and merged give attention over all of them") {
  const std::vector<std::vector<std::int64_t>> partitions = {
      {0, 700}, {0, 350, 700}, {0, 0, 1, 1, 700, 700}, {0, 1, 2, 3, 100, 101, 356, 612, 699, 700}};
  for (const DataType dtype : dtypes) {
    for (const char* feature : {"", "softcap=10", "mask=bhk mask_keep=0.01", "key=bsh value=bsh key_magnitude=20"}) {
      for (const auto& cuts : partitions) {
        AttentionCase c =
            parse_case(std::string("batch=2 query_heads=6 kv_heads=2 keys=700 head_dim=64 scale=0.125 ") + feature);
        c.dtype = dtype;
        const AttentionData data(c);
        // The parts' outputs are rounded to the dtype once more, as rounded weights would be.
        const Comparison comparison =
            compare(merged_parts(data, device, cuts), reference(data.host_problem()), dtype, Weights::rounded);
        INFO(to_line(c) << " in " << cuts.size() - 1 << " parts");
        INFO(comparison.failure);
        CHECK(comparison.passed());
      }
    }
  }
}

} // namespace single_query::test
