// Every feature of attention agrees with double, alone and with every other one, and a row's bits depend on nothing but
// the row.
#include "each_device.h"
#include "random_case.h"

#include <string>
#include <vector>

namespace single_query::test {
namespace {

const std::vector<std::string> dtypes = {"dtype=float32 ", "dtype=float16 ", "dtype=bfloat16 "};

// The first takes the fast paths, the second none of them, the third those for the few keys of single query heads, and
// of the fourth's query heads the warps form teams.
const std::vector<std::string> bases = {
    "batch=4 query_heads=8 kv_heads=2 keys=531 head_dim=64 scale=0.125 key_magnitude=4 ",
    "batch=3 query_heads=9 kv_heads=3 keys=70 head_dim=45 scale=0.15 key_magnitude=4 key=bsh value=bsh@1 query=bh+1 ",
    "batch=2 query_heads=3 kv_heads=3 keys=100 head_dim=32 scale=0.2 key_magnitude=4 ",
    "batch=9 query_heads=24 kv_heads=1 keys=90 head_dim=16 scale=0.25 key_magnitude=4 "};

void sweep_features(Device device, const std::vector<std::string>& features) {
  Sweep sweep(device);
  for (const std::string& dtype : dtypes) {
    for (const std::string& base : bases) {
      for (const std::string& feature : features) {
        sweep.add(parse_case(dtype + base + feature));
      }
    }
  }
  sweep.finish();
}

} // namespace

TEST_ON_EACH_DEVICE("Lengths agree with double") {
  sweep_features(device, {"lengths=b", "lengths=b length_kind=mixed", "lengths=b length_kind=brief",
                          "lengths=b length_kind=full", "lengths=b lengths_type=int64 length_kind=mixed",
                          "lengths=b+2@1 length_kind=mixed fill=infinity"});
}

TEST_ON_EACH_DEVICE("Pages agree with double") {
  std::vector<std::string> features;
  for (const char* size : {"1", "2", "7", "15", "16", "48", "64", "128", "256", "1000"}) {
    for (const char* rest : {"key=bsh value=bsh", "key=bhs value=bhs", "key=b2sh", "key=bs2h length_kind=mixed"}) {
      features.push_back("lengths=b page_table=bp page_size=" + std::string(size) + " " + rest);
    }
  }
  features.push_back("lengths=b page_table=pb@3 page_size=16 spare_pages=5 length_kind=mixed");
  features.push_back("lengths=b page_table=bp+2 page_size=16 fill=infinity length_kind=brief");
  sweep_features(device, features);
}

// One block takes a whole row, so that every warp goes through many pages.
TEST_ON_EACH_DEVICE("Pages agree with double over many steps") {
  Sweep sweep(device);
  for (const std::string& dtype : dtypes) {
    for (const char* heads : {"query_heads=2 kv_heads=2 ", "query_heads=8 kv_heads=2 ", "query_heads=40 kv_heads=1 "}) {
      for (const char* pages : {"page_size=16", "page_size=48 length_kind=full", "page_size=7", "page_size=1"}) {
        sweep.add(parse_case(dtype + heads + pages +
                             " batch=2 keys=2000 split_size=2000 head_dim=64 scale=0.125 "
                             "key_magnitude=4 lengths=b page_table=bp"));
      }
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("Windows agree with double") {
  std::vector<std::string> features;
  for (const char* window : {"1", "2", "16", "33", "69", "70", "71", "300", "530", "531", "532", "2147483648"}) {
    for (const char* rest : {"", "lengths=b length_kind=mixed", "lengths=b page_table=bp page_size=16"}) {
      features.push_back("window=" + std::string(window) + " " + rest);
    }
  }
  sweep_features(device, features);
}

TEST_ON_EACH_DEVICE("Softcap, ALiBi and sinks agree with double") {
  sweep_features(device, {"softcap=0.5", "softcap=20", "softcap=20 key_magnitude=400", "alibi=bh", "alibi=bh/b",
                          "alibi=hb+1@1", "alibi=bh/bh lengths=b length_kind=mixed", "sinks=h", "sinks=h/h",
                          "sinks=h+2@1 lengths=b length_kind=mixed"});
}

TEST_ON_EACH_DEVICE("Masks agree with double") {
  std::vector<std::string> features;
  for (const char* type : {"boolean", "float32", "float16", "bfloat16"}) {
    for (const char* layout : {"bhk", "bhk/h", "bhk/b", "bhk/bh", "kbh", "bhk+1@1", "bhk/k"}) {
      features.push_back("mask_type=" + std::string(type) + " mask=" + layout);
    }
    features.push_back("mask_type=" + std::string(type) + " mask=bhk mask_keep=0.02 lengths=b length_kind=mixed");
    features.push_back("mask_type=" + std::string(type) +
                       " mask=bhk mask_keep=0.9 lengths=b page_table=bp page_size=16");
  }
  sweep_features(device, features);
}

TEST_ON_EACH_DEVICE("Every pair of features agrees with double") {
  const std::vector<std::string> features = {"lengths=b length_kind=mixed",
                                             "lengths=b page_table=bp page_size=16",
                                             "window=50",
                                             "softcap=15",
                                             "alibi=bh",
                                             "mask=bhk",
                                             "mask=bhk/h mask_type=float32",
                                             "sinks=h",
                                             "split_size=64",
                                             "key=b2sh",
                                             "specials=2",
                                             "scale=-0.1"};
  std::vector<std::string> pairs;
  for (std::size_t i = 0; i < features.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      pairs.push_back(features[j] + " " + features[i]);
    }
  }
  pairs.push_back("lengths=b page_table=bp page_size=16 window=50 softcap=15 alibi=bh mask=bhk sinks=h split_size=64");
  sweep_features(device, pairs);
}

TEST_ON_EACH_DEVICE("Every feature over a long context agrees with double", "[large]") {
  Sweep sweep(device);
  for (const std::string& dtype : dtypes) {
    const std::string base = dtype + "batch=2 query_heads=4 kv_heads=1 keys=20000 head_dim=64 scale=0.125 ";
    for (const char* feature :
         {"lengths=b", "lengths=b length_kind=brief", "lengths=b page_table=bp page_size=16",
          "lengths=b page_table=bp page_size=1 key=bsh value=bsh", "window=4096", "softcap=10 alibi=bh sinks=h",
          "mask=bhk mask_keep=0.001", "mask=bhk/bh mask_type=float32", "split_size=256 lengths=b"}) {
      sweep.add(parse_case(base + feature));
    }
  }
  sweep.finish();
}

TEST_ON_EACH_DEVICE("2^31 - 1 keys are allocated and few take part", "[large]") {
  for (const std::string& dtype : dtypes) {
    // One key for all slots, so that they fit into memory; ALiBi tells them apart.
    const std::string base =
        dtype + "batch=2 query_heads=4 kv_heads=2 head_dim=64 scale=0.125 alibi=bh key=bhs/s value=bhs/s ";
    for (const char* few :
         {"keys=2147483647 window=10", "keys=2147483647 window=3000 softcap=5 sinks=h",
          "keys=2147483647 lengths=b length_kind=brief", "keys=2147483647 window=70 mask=bhk/k mask_keep=1",
          ("keys=2147483000 window=2000 page_size=1000 page_table=bp/b lengths=b length_kind=full key=bhs/bs "
           "value=bhs/bs")}) {
      expect_pass(AttentionData(parse_case(base + few)), device);
    }
  }
}

TEST_ON_EACH_DEVICE("A37: with a split_size a row's bits do not depend on batch, neighbours, capacity or paging",
                    "[large]") {
  for (const std::string& dtype : dtypes) {
    for (const char* split : {"split_size=1000 ", "split_size=64 ", "split_size=100 "}) {
      for (const char* feature : {"", "window=300 ", "softcap=20 alibi=bh sinks=h ", "mask=bhk mask_type=float32 ",
                                  "query_heads=68 kv_heads=1 "}) { // many heads: their tiles make teams
        const std::string row = dtype + split + "query_heads=8 kv_heads=2 " + feature + "head_dim=64 scale=0.125 ";
        const AttentionData source(parse_case(row + "batch=4 keys=700 lengths=b key_magnitude=4"));
        INFO(to_line(source.attention_case()));
        const Result expected = run(source, device);
        const std::int64_t heads = source.attention_case().query_heads;
        for (const std::int64_t b : {0, 3}) {
          for (const char* where :
               {"batch=1 keys=700 lengths=b", "batch=1 keys=3000 lengths=b", "batch=3 keys=701 lengths=b key=bsh",
                "batch=20 keys=700 lengths=b", "batch=3 keys=700 lengths=b page_table=bp page_size=16",
                "batch=2 keys=900 lengths=b page_table=bp page_size=48",
                "batch=1 keys=700 lengths=b key=bsh value=bsh page_table=bp page_size=256"}) {
            AttentionData target(parse_case(row + where + " seed=7"));
            const std::int64_t to = target.attention_case().batch / 2;
            target.set_length(to, source.length(b));
            source.copy_row(b, target, to, 0);
            INFO("row " << b << " at " << to << " of " << where);
            CHECK(same_rows(expected, b * heads, run(target, device), to * heads, heads));
          }
        }
      }
    }
  }
}

TEST_ON_EACH_DEVICE("Excluded keys, unused slots and unused pages may hold anything") {
  for (const char* fill : {"fill=nan ", "fill=infinity ", "fill=byte_7f "}) {
    sweep_features(device,
                   {std::string(fill) + "lengths=b length_kind=mixed",
                    std::string(fill) + "lengths=b page_table=bp page_size=16 spare_pages=2",
                    std::string(fill) + "window=17 lengths=b", std::string(fill) + "mask=bhk mask_keep=0.3",
                    std::string(fill) + "mask=bhk/h mask_type=float16 mask_keep=0.3",
                    std::string(fill) + "lengths=b page_table=bp page_size=16 mask=bhk/h mask_keep=0.05 evicted=1",
                    std::string(fill) + "lengths=b page_table=bp page_size=3 mask=bhk mask_keep=0.1 evicted=1"});
  }
}

TEST_ON_EACH_DEVICE("NaN and infinity among the keys that take part show as IEEE arithmetic has them") {
  for (const std::string& dtype : dtypes) {
    for (const std::string& base : bases) {
      for (int seed = 1; seed <= 25; ++seed) {
        expect_pass(AttentionData(parse_case(dtype + base + "specials=3 seed=" + std::to_string(seed))), device);
      }
    }
  }
}

TEST_ON_EACH_DEVICE("An added NaN shows in its own row, an added infinity as a NaN") {
  for (const double added : {double(NAN), double(INFINITY)}) {
    AttentionData data(parse_case("batch=2 query_heads=2 keys=20 head_dim=8 mask=bhk mask_type=float32 mask_keep=1"));
    data.set_mask(1, 0, 3, added);
    expect_pass(data, device);
    CHECK(std::isnan(output_at(run(data, device), 2)));
  }
}

TEST_ON_EACH_DEVICE("Keys whose scores are all -inf count as none, beside a sink too") {
  for (const std::string& dtype : dtypes) {
    for (const char* sinks : {"", " sinks=h"}) {
      for (const char* shape : {"head_dim=8 query_heads=1", "head_dim=8 query_heads=2", "head_dim=136 query_heads=9"}) {
        AttentionData data(parse_case(dtype + shape + " keys=20 scale=1" + sinks));
        const AttentionCase& c = data.attention_case();
        for (std::int64_t d = 0; d < c.head_dim; ++d) {
          for (std::int64_t h = 0; h < c.query_heads; ++h) {
            data.set_query(0, h, d, 1);
          }
          for (std::int64_t n = 0; n < c.keys; ++n) {
            data.set_key(0, 0, n, d, d == 0 ? -INFINITY : 1);
            data.set_value(0, 0, n, d, d % 2 == 0 ? NAN : INFINITY);
          }
        }
        expect_pass(data, device);
        CHECK(output_at(run(data, device), 0, 0) == 0);
      }
    }
  }
}

TEST_ON_EACH_DEVICE("A sink of NaN or infinity makes its head's rows NaN, one of -inf does nothing") {
  AttentionData data(parse_case("batch=2 query_heads=3 keys=20 head_dim=8 sinks=h"));
  data.set_sink(0, NAN);
  data.set_sink(1, INFINITY);
  data.set_sink(2, -INFINITY);
  expect_pass(data, device);
  const Result result = run(data, device);
  CHECK(std::isnan(output_at(result, 0)));
  CHECK(std::isnan(output_at(result, 1)));
  CHECK(!std::isnan(output_at(result, 2)));
}

TEST_ON_EACH_DEVICE("A row without keys has output 0 and the sink as log-sum-exp") {
  for (const std::string& dtype : dtypes) {
    AttentionData data(parse_case(dtype + "query_heads=2 keys=9 head_dim=33 sinks=h lengths=b"));
    data.set_length(0, 0);
    data.set_sink(0, 1.25f);
    data.set_sink(1, -INFINITY);
    const Result result = run(data, device);
    CHECK(output_at(result, 0, 32) == 0);
    CHECK(output_at(result, 1, 0) == 0);
    CHECK(result.lse[0] == 1.25f);
    CHECK(result.lse[1] == -INFINITY);
  }
}

TEST_ON_EACH_DEVICE("A page outside the pool makes its row NaN and touches no other") {
  for (const std::string& dtype : dtypes) {
    for (const std::int64_t group : {2, 1, 24}) {
      for (const std::int32_t page :
           {-1, 18, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
        for (const std::int64_t entry : {0, 2, 3, 4}) {
          AttentionData data(parse_case(dtype + "query_heads=" + std::to_string(2 * group) +
                                        " batch=3 kv_heads=2 keys=90 head_dim=64 lengths=b length_kind=full "
                                        "page_table=bp page_size=16"));
          data.set_page(1, entry, page);
          expect_pass(data, device);
          const Result result = run(data, device);
          CHECK(std::isnan(output_at(result, 2 * group)));
          CHECK(std::isnan(result.lse[static_cast<std::size_t>(4 * group - 1)]));
          data.set_length(1, entry * 16); // now no key needs it
          expect_pass(data, device);
        }
      }
    }
  }
}

TEST_ON_EACH_DEVICE("A page outside the pool counts for the heads that a mask lets see one of its keys") {
  for (const std::string& dtype : dtypes) {
    for (const char* rest : {"mask=bhk", "mask=bhk mask_type=float32 split_size=32", "mask=bhk window=60"}) {
      for (const char* heads :
           {"query_heads=4 kv_heads=2 ", "query_heads=2 kv_heads=2 ", "query_heads=18 kv_heads=2 "}) {
        AttentionData data(parse_case(dtype + heads +
                                      "batch=2 keys=90 head_dim=64 lengths=b length_kind=full "
                                      "page_table=bp page_size=16 mask_keep=1 " +
                                      rest));
        const std::int64_t group = data.attention_case().query_heads / 2;
        for (std::int64_t n = 48; n < 64; ++n) { // for all heads but one, which sees the page's last key
          for (std::int64_t h = 0; h < 2 * group; ++h) {
            data.set_mask(1, h, n,
                          n == 63 && h == 0                                      ? 1
                          : data.attention_case().mask_type == MaskType::boolean ? 0
                                                                                 : -INFINITY);
          }
        }
        data.set_page(1, 3, -5);
        expect_pass(data, device);
        const Result result = run(data, device);
        CHECK(std::isnan(output_at(result, 2 * group)));
        CHECK(std::isnan(result.lse[static_cast<std::size_t>(2 * group)]));
        CHECK(!std::isnan(output_at(result, 2 * group + 1)));
        CHECK(!std::isnan(result.lse[static_cast<std::size_t>(4 * group - 1)]));
      }
    }
  }
}

TEST_ON_EACH_DEVICE("Random combinations agree with double") {
  Sweep sweep(device);
  for (std::uint64_t seed = 1'000'001; seed <= 1'000'150; ++seed) {
    sweep.add(random_case(seed, 300'000));
  }
  sweep.finish();
}

} // namespace single_query::test
