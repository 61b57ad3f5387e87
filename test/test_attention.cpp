// Attention agrees with double over every dtype, size and layout, and exactly where the answer is exact.
#include "each_device.h"
#include "refusal.h"

#include <vector>

namespace single_query::test {
namespace {

const std::vector<DataType> dtypes = {DataType::float32, DataType::float16, DataType::bfloat16};

} // namespace

TEST_ON_EACH_DEVICE("Every head_dim and number of keys agrees with double") {
  Sweep sweep(device);
  std::int64_t group = 0;
  for (const DataType dtype : dtypes) {
    for (const std::int64_t head_dim : {1, 2, 3, 8, 17, 32, 40, 64, 72, 80, 96, 127, 128, 136, 192, 255, 256}) {
      for (const std::int64_t keys : {1, 2, 3, 15, 17, 64, 129, 1021}) {
        group = group % 8 + 1;
        sweep.add(sized(dtype, 1, 2, group, keys, head_dim));
      }
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Every group of query heads agrees with double") {
  Sweep sweep(device);
  for (const DataType dtype : dtypes) {
    for (const std::int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 64, 128}) {
      sweep.add(sized(dtype, 2, 1, group, 257, 64));
      sweep.add(sized(dtype, 1, 3, group, 130, 45));
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Many query heads of a key/value head agree with double") {
  Sweep sweep(device);
  for (const DataType dtype : {DataType::float16, DataType::bfloat16}) {
    for (const std::int64_t group : {40, 64, 100, 129}) {
      for (const std::int64_t head_dim : {40, 64, 128}) {
        for (const std::int64_t keys : {1, 127, 1000, 4100}) {
          sweep.add(sized(dtype, 1, 1, group, keys, head_dim));
        }
        AttentionCase c = sized(dtype, 8, 1, group, 700, head_dim);
        sweep.add(c);
        c.window = 333; // begins in the middle of a step
        c.key.order = c.value.order = "bsh";
        c.sinks.order = "h";
        sweep.add(c);
        c.specials = 3;
        sweep.add(c);
      }
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Every number of keys round a power of two agrees with double") {
  Sweep sweep(device);
  for (std::int64_t power = 2; power <= 65536; power *= 2) {
    for (const std::int64_t keys : {power - 1, power, power + 1}) {
      for (const DataType dtype : dtypes) {
        sweep.add(sized(dtype, 1, 1, 1 + power % 3, keys, power > 8192 ? 16 : 64));
      }
    }
  }
  sweep.finish();
}

// One key more than equal shares hold, and the last blocks of a row have none.
TEST_ON_EACH_DEVICE("Rows of which some blocks get no key agree with double") {
  Sweep sweep(device);
  for (const DataType dtype : dtypes) {
    for (const std::int64_t group : {3, 24, 128}) {
      AttentionCase c = sized(dtype, 1, 1, group, 16385, 64);
      sweep.add(c);
      c.keys = 20000;
      c.window = 16385; // begins in the middle of a step
      sweep.add(c);
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Many rows agree with double") {
  Sweep sweep(device);
  for (const DataType dtype : dtypes) {
    for (const std::int64_t batch : {1, 3, 16, 64, 133, 300}) {
      sweep.add(sized(dtype, batch, 1, 4, 77, 64));
      sweep.add(sized(dtype, batch, 5, 2, 40, 33));
    }
    sweep.add(sized(dtype, 300, 1, 24, 77, 16)); // teams go from row to row
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Long contexts agree with double", "[large]") {
  Sweep sweep(device);
  sweep.add(sized(DataType::float32, 1, 1, 1, 1'000'003, 8));
  for (const DataType dtype : dtypes) {
    sweep.add(sized(dtype, 1, 2, 4, 70'001, 32));
    sweep.add(sized(dtype, 3, 1, 8, 20'000, 128));
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Every layout agrees with double") {
  Sweep sweep(device);
  const char* layouts[] = {"key=bsh value=bsh",
                           "key=bsh",
                           "value=bsh",
                           "key=hbs value=shb",
                           "key=b2sh",
                           "key=bs2h",
                           "key=bsh2",
                           "key=2bhs@3",
                           "key=bhs/b value=bhs/b",
                           "key=bhs/h value=bhs/h",
                           "key=bhs/bh value=bhs/h+1",
                           "key=bhs@1",
                           "value=bhs@1",
                           "query=bh@1",
                           "output=bh@1",
                           "key=bhs@4 value=bhs@4 query=bh@4 output=bh@4",
                           "key=bhs+1 value=bhs+3",
                           "key=bhs+8 value=bhs+64",
                           "query=bh+5 output=bh+7",
                           "query=hb output=hb lse=hb",
                           "query=bh/b",
                           "query=bh/h",
                           "output=bh+64 lse=hb+3@2"};
  for (const DataType dtype : dtypes) {
    for (const char* layout : layouts) {
      for (const std::int64_t head_dim : {64, 46}) {
        AttentionCase c = parse_case(layout);
        const AttentionCase sizes = sized(dtype, 2, 3, 2, 141, head_dim);
        c.dtype = dtype;
        c.batch = sizes.batch;
        c.kv_heads = sizes.kv_heads;
        c.query_heads = sizes.query_heads;
        c.keys = sizes.keys;
        c.head_dim = head_dim;
        c.scale = sizes.scale;
        sweep.add(c);
        c.guarded = false;
        sweep.add(c);
      }
    }
  }
  sweep.finish();
}

// Enough keys for the host twin to take the rows of several heads together, of which 5 leave some over.
TEST_ON_EACH_DEVICE("Many keys of heads side by side agree with double") {
  Sweep sweep(device);
  const char* variants[] = {"dtype=float32 head_dim=256",
                            "dtype=float16 split_size=128",
                            "dtype=bfloat16 query_heads=60 split_size=128",
                            "dtype=float32 split_size=128 mask=bhk",
                            "dtype=bfloat16 split_size=128 mask=bhk/h window=5000",
                            "dtype=float32 split_size=128 lengths=b length_kind=mixed batch=2"};
  for (const char* variant : variants) {
    AttentionCase c = parse_case("kv_heads=5 query_heads=15 keys=7000 head_dim=23 key=bsh value=bsh scale=0.2 " +
                                 std::string(variant));
    sweep.add(c);
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Few keys of one query head per key/value head agree with double") {
  Sweep sweep(device);
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    for (const char* head_dim : {"8", "32", "40", "64", "96", "128", "136"}) {
      for (const char* keys : {"1", "63", "64", "65", "255", "256", "257", "1023", "1024", "1025"}) {
        for (const char* rows : {"batch=1 query_heads=1 kv_heads=1 ", "batch=2 query_heads=8 kv_heads=8 key=bsh ",
                                 "batch=17 query_heads=1 kv_heads=1 sinks=h window=60 value=bsh+8 "}) {
          sweep.add(parse_case("dtype=" + std::string(dtype) + " key_magnitude=4 scale=0.2 head_dim=" + head_dim +
                               " keys=" + keys + " " + rows));
        }
      }
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Rows of every alignment agree with double") {
  Sweep sweep(device);
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    for (const char* head_dim :
         {"1", "3", "4", "6", "12", "63", "64", "90", "100", "127", "128", "129", "255", "256"}) {
      for (const char* layout :
           {"key=bsh@1 value=bsh", "key=bhs+1@1 value=bhs+1", "key=bsh value=bsh+2@2 query=bh@1",
            "key=bhs+4@4 value=bhs+3", "query=bh+1@3", "key=bsh@1 value=bsh@1 lengths=b page_table=bp page_size=16",
            "key=bhs+1 value=bhs@2 lengths=b page_table=bp page_size=7", "key=bsh+1 value=bsh@1 window=41"}) {
        sweep.add(parse_case("batch=2 query_heads=6 kv_heads=2 keys=117 scale=0.15 key_magnitude=4 dtype=" +
                             std::string(dtype) + " head_dim=" + head_dim + " " + layout));
      }
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("One key and value for all slots agrees with double") {
  // Sums of equal terms round the same way every time: within the bounds, but not random as the gate T2 has it.
  for (const DataType dtype : dtypes) {
    for (const std::int64_t keys : {2, 100, 5000}) {
      AttentionCase c = sized(dtype, 2, 3, 2, keys, 64);
      c.key.shared = "s";
      c.value.shared = "s";
      expect_pass(AttentionData(c), device);
    }
  }
}

TEST_ON_EACH_DEVICE("Strides of axes of size 1 do not matter") {
  for (const DataType dtype : dtypes) {
    for (const std::int64_t keys : {1, 70}) {
      AttentionCase c = sized(dtype, 1, 1, 1, keys, 64);
      c.garbage_strides = true;
      expect_pass(AttentionData(c), device);
      c.page_size = 1;
      c.keys = 1;
      c.page_table = {"bp"};
      c.lengths = {"b"};
      c.length_kind = LengthKind::full;
      expect_pass(AttentionData(c), device);
    }
  }
}

TEST_ON_EACH_DEVICE("Strides of axes of size 1 do not change a row's bits") {
  for (const DataType dtype : dtypes) {
    for (const char* rest : {"", "split_size=100 ", "keys=20000 "}) {
      const std::string line = rest + std::string("head_dim=64 query_heads=4 ") + (rest[0] == 'k' ? "" : "keys=300");
      AttentionCase c = parse_case(line);
      c.dtype = dtype;
      const Result expected = run(AttentionData(c), device);
      c.garbage_strides = true;
      INFO(to_line(c));
      CHECK(same_rows(expected, 0, run(AttentionData(c), device), 0, 4));
    }
  }
}

TEST_ON_EACH_DEVICE("A split size whose workspace has no size in 64 bits is refused by name") {
  AttentionProblem problem = contiguous_problem(DataType::float32, 1 << 20, 1 << 16, 1 << 16, 0x7fffffff, 64);
  problem.query_stride_batch = problem.query_stride_head = 0;
  problem.key_stride_page = problem.key_stride_head = problem.key_stride_slot = 0;
  problem.value_stride_page = problem.value_stride_head = problem.value_stride_slot = 0;
  problem.split_size = 1;
  problem.query = problem.key = problem.value = reinterpret_cast<const void*>(0x10000);
  problem.output = reinterpret_cast<void*>(0x200000000000); // nothing is read or written there
  const std::string message = refusal(
      [&] { device == Device::cpu ? attention_on_host_workspace_bytes(problem) : attention_workspace_bytes(problem); });
  CHECK(message == "attention: split_size is 1: the workspace for so many splits does not fit into 64 bits");
}

TEST_ON_EACH_DEVICE("A key that takes all the weight gives its value bit for bit", "[large]") {
  for (const DataType dtype : dtypes) {
    for (const std::int64_t head_dim : {1, 32, 64, 77, 128, 256}) {
      for (const std::int64_t keys : {1, 2, 100, 5000}) {
        AttentionCase c = sized(dtype, 2, 2, 3, keys, head_dim);
        c.values = Values::one_hot;
        c.value_magnitude = 1000;
        const AttentionData data(c);
        INFO(to_line(c));
        const Reference expected = reference(data.host_problem());
        const Result result = run(data, device);
        CHECK(first_bit_difference(result, expected, dtype) == "");
        for (std::size_t row = 0; row < result.lse.size(); ++row) {
          CHECK(result.lse[row] == static_cast<float>(expected.lse[row]));
        }
      }
    }
  }
}

TEST_ON_EACH_DEVICE("Equal scores over a power of two of keys give the mean of small integers bit for bit", "[large]") {
  for (const DataType dtype : dtypes) {
    for (const std::int64_t head_dim : {1, 40, 64, 128, 201}) {
      for (std::int64_t keys = 1; keys <= 4096; keys *= 4) {
        AttentionCase c = sized(dtype, 2, 2, 2, keys, head_dim);
        c.values = Values::zero_keys;
        const AttentionData data(c);
        INFO(to_line(c));
        CHECK(first_bit_difference(run(data, device), reference(data.host_problem()), dtype) == "");
      }
    }
  }
}

TEST_ON_EACH_DEVICE("Two keys of small integers with equal products give their mean bit for bit") {
  for (const DataType dtype : dtypes) {
    AttentionData data(sized(dtype, 1, 1, 4, 2, 4));
    for (std::int64_t d = 0; d < 4; ++d) {
      for (std::int64_t h = 0; h < 4; ++h) {
        data.set_query(0, h, d, static_cast<double>(h + 1));
      }
      data.set_key(0, 0, 0, d, static_cast<double>(d));     // 0 + 1 + 2 + 3
      data.set_key(0, 0, 1, d, static_cast<double>(3 - d)); // 3 + 2 + 1 + 0
      data.set_value(0, 0, 0, d, static_cast<double>(d));
      data.set_value(0, 0, 1, d, static_cast<double>(d * 3));
    }
    CHECK(first_bit_difference(run(data, device), reference(data.host_problem()), dtype) == "");
  }
}

TEST_ON_EACH_DEVICE("Values at the end of the dtype's range stay finite") {
  for (const DataType dtype : dtypes) {
    for (const std::int64_t keys : {1, 3, 100, 3000}) {
      AttentionCase c = sized(dtype, 1, 2, 4, keys, 64);
      AttentionData data(c);
      for (std::int64_t n = 0; n < keys; ++n) {
        for (std::int64_t d = 0; d < c.head_dim; ++d) {
          for (std::int64_t kv_head = 0; kv_head < 2; ++kv_head) {
            data.set_value(0, kv_head, n, d, (d % 2 == 0 ? 1 : -1) * format_of(dtype).largest);
          }
        }
      }
      expect_pass(data, device);
    }
  }
}

TEST_ON_EACH_DEVICE("Small values keep their precision") {
  Sweep sweep(device);
  for (const DataType dtype : dtypes) {
    for (const double magnitude : {1e-4, 1e-7, 1e-20, 1e-30}) {
      AttentionCase c = sized(dtype, 1, 2, 4, 200, 64);
      c.value_magnitude = magnitude;
      sweep.add(c);
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Scores of any size agree with double") {
  Sweep sweep(device);
  for (const DataType dtype : dtypes) {
    const double end = dtype == DataType::float16 ? 60000 : 1e18;
    for (const double magnitude : {0.0, 1e-4, 1.0, 30.0, 1000.0, end}) {
      for (const float scale : {1.0f, -0.125f, 0.0f, 1e-6f}) {
        AttentionCase c = sized(dtype, 2, 1, 5, 300, 64);
        c.scale = scale;
        c.query_magnitude = magnitude;
        c.key_magnitude = magnitude;
        sweep.add(c);
      }
    }
  }
  sweep.finish();
}

TEST_CASE("contiguous_problem describes dense tensors") {
  const AttentionProblem p = contiguous_problem(DataType::bfloat16, 2, 6, 3, 5, 7);
  CHECK(p.dtype == DataType::bfloat16);
  CHECK((p.batch == 2 && p.query_heads == 6 && p.kv_heads == 3 && p.head_dim == 7));
  CHECK((p.pages == 2 && p.page_size == 5 && p.max_pages == 1));
  CHECK((p.query_stride_batch == 42 && p.query_stride_head == 7));
  CHECK((p.output_stride_batch == 42 && p.output_stride_head == 7));
  CHECK((p.lse_stride_batch == 6 && p.lse_stride_head == 1));
  CHECK((p.key_stride_page == 105 && p.key_stride_head == 35 && p.key_stride_slot == 7));
  CHECK((p.value_stride_page == 105 && p.value_stride_head == 35 && p.value_stride_slot == 7));
  CHECK(p.scale == 1 / std::sqrt(7.0f));
  CHECK((p.query == nullptr && p.key == nullptr && p.value == nullptr && p.output == nullptr && p.lse == nullptr));
}

} // namespace single_query::test
