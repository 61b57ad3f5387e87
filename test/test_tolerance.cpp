// The tests' own judges: they have to fail what is wrong.
#include "each_device.h"

#include "random_case.h"
#include "reference_device.h"

namespace single_query::test {
namespace {

// A result that is the reference rounded to the dtype, and passes.
Result perfect(const Reference& expected, DataType dtype) {
  Result result;
  result.dtype = dtype;
  result.rows = expected.rows;
  result.head_dim = expected.head_dim;
  result.output.resize(expected.output.size() * static_cast<std::size_t>(format_of(dtype).bytes));
  for (std::size_t i = 0; i < expected.output.size(); ++i) {
    encode(dtype, result.output.data(), static_cast<std::int64_t>(i), expected.output[i]);
  }
  result.lse.assign(expected.lse.begin(), expected.lse.end());
  return result;
}

void set_output(Result& result, std::int64_t at, double value) {
  encode(result.dtype, result.output.data(), at, value);
}

bool passes(const Result& result, const Reference& expected, DataType dtype) {
  return compare(result, expected, dtype, Weights::float32).passed();
}

} // namespace

TEST_CASE("A52: a NaN, an infinity or a wrong lse in the result fails the comparison") {
  for (const DataType dtype : {DataType::float32, DataType::float16, DataType::bfloat16}) {
    AttentionCase c = parse_case("batch=2 query_heads=2 keys=30 head_dim=16");
    c.dtype = dtype;
    const Reference expected = reference(AttentionData(c).host_problem());
    const Result good = perfect(expected, dtype);
    CHECK(passes(good, expected, dtype));
    for (const double wrong : {double(NAN), double(INFINITY), -double(INFINITY)}) {
      Result bad = good;
      set_output(bad, 37, wrong);
      CHECK_FALSE(passes(bad, expected, dtype));
      bad = good;
      bad.lse[3] = static_cast<float>(wrong);
      CHECK_FALSE(passes(bad, expected, dtype));
    }
    Result bad = good;
    bad.lse[1] *= 1.442695f; // of base 2
    CHECK_FALSE(passes(bad, expected, dtype));
  }
}

TEST_CASE("A52: a number where a NaN or an infinity belongs fails the comparison") {
  AttentionData data(parse_case("query_heads=1 keys=5 head_dim=4"));
  data.set_value(0, 0, 2, 1, NAN);
  data.set_value(0, 0, 2, 2, INFINITY);
  const Reference expected = reference(data.host_problem());
  const Result good = perfect(expected, DataType::float32);
  CHECK(passes(good, expected, DataType::float32));
  for (const std::int64_t at : {1, 2}) {
    Result bad = good;
    set_output(bad, at, 0.25);
    CHECK_FALSE(passes(bad, expected, DataType::float32));
    set_output(bad, at, -INFINITY);
    CHECK_FALSE(passes(bad, expected, DataType::float32));
  }
}

TEST_CASE("A52: a wrong dtype or shape fails the comparison") {
  const Reference expected = reference(AttentionData(parse_case("query_heads=2 keys=5 head_dim=4")).host_problem());
  const Result good = perfect(expected, DataType::float16);
  CHECK(passes(good, expected, DataType::float16));
  CHECK_FALSE(passes(good, expected, DataType::bfloat16));
  CHECK_FALSE(passes(good, expected, DataType::float32));
  Result bad = good;
  bad.rows = 1;
  CHECK_FALSE(passes(bad, expected, DataType::float16));
  bad = good;
  std::swap(bad.rows, bad.head_dim);
  CHECK_FALSE(passes(bad, expected, DataType::float16));
  bad = good;
  bad.output.resize(bad.output.size() - 2);
  CHECK_FALSE(passes(bad, expected, DataType::float16));
  bad = good;
  bad.lse.pop_back();
  CHECK_FALSE(passes(bad, expected, DataType::float16));
}

TEST_CASE("A52: one bad element in a million fails the comparison") {
  for (const DataType dtype : {DataType::float32, DataType::float16, DataType::bfloat16}) {
    AttentionCase c = parse_case("batch=4000 query_heads=1 keys=2 head_dim=250");
    c.dtype = dtype;
    const Reference expected = reference(AttentionData(c).host_problem());
    const Result good = perfect(expected, dtype);
    CHECK(passes(good, expected, dtype));
    for (const std::int64_t at : {0, 777'777, 999'999}) {
      Result bad = good;
      set_output(bad, at, expected.output[static_cast<std::size_t>(at)] + (dtype == DataType::float32 ? 1e-5 : 0.05));
      CHECK_FALSE(passes(bad, expected, dtype));
      CHECK(first_bit_difference(bad, expected, dtype) != "");
    }
    Result bad = good;
    bad.lse[3999] += 1e-4f;
    CHECK_FALSE(passes(bad, expected, dtype));
  }
}

TEST_CASE("A53: the reference is double, and a result of TF32 fails against it") {
  AttentionData data(parse_case("query_heads=1 keys=2 head_dim=1 value_magnitude=1"));
  AttentionData coarse(data.attention_case());
  const double fine = 1 + 0x1p-13; // TF32 has 10 bits behind the point
  for (AttentionData* each : {&data, &coarse}) {
    const double factor = each == &data ? fine : 1;
    each->set_query(0, 0, 0, 1);
    each->set_key(0, 0, 0, 0, 0);
    each->set_key(0, 0, 1, 0, 4 * factor);
    each->set_value(0, 0, 0, 0, 0);
    each->set_value(0, 0, 1, 0, factor);
  }
  const Reference expected = reference(data.host_problem());
  const double weight = 1 / (1 + std::exp(-4 * fine));
  CHECK(std::fabs(expected.output[0] - weight * fine) < 1e-15);
  CHECK(std::fabs(expected.lse[0] - std::log(1 + std::exp(4 * fine))) < 1e-14);
  CHECK_FALSE(passes(perfect(reference(coarse.host_problem()), DataType::float32), expected, DataType::float32));
}

TEST_CASE("A53: inputs rounded to TF32 fail the comparison") {
  const auto to_tf32 = [](double x) { // 11 bits in all, ties away from 0: what the tensor cores are given
    int exponent = 0;
    const double fraction = std::frexp(x, &exponent);
    return std::ldexp(std::round(std::ldexp(fraction, 11)), exponent - 11);
  };
  AttentionData data(parse_case("query_heads=1 keys=100 head_dim=64 scale=0.125"));
  AttentionData coarse(data.attention_case());
  Random random(1);
  const auto set_both = [&](const auto& set) {
    const double x = rounded(DataType::float32, random.uniform(-1, 1));
    set(data, x);
    set(coarse, to_tf32(x));
  };
  for (std::int64_t d = 0; d < 64; ++d) {
    set_both([d](AttentionData& each, double x) { each.set_query(0, 0, d, x); });
    for (std::int64_t n = 0; n < 100; ++n) {
      set_both([d, n](AttentionData& each, double x) { each.set_key(0, 0, n, d, x); });
      set_both([d, n](AttentionData& each, double x) { each.set_value(0, 0, n, d, x); });
    }
  }
  const Reference expected = reference(data.host_problem());
  CHECK(passes(perfect(expected, DataType::float32), expected, DataType::float32));
  CHECK_FALSE(passes(perfect(reference(coarse.host_problem()), DataType::float32), expected, DataType::float32));
}

TEST_CASE("The reference on the GPU is the reference on the host", "[gpu]") {
  const auto close = [](double a, double b) {
    return (std::isnan(a) && std::isnan(b)) || a == b || std::fabs(a - b) <= 1e-11 * (std::fabs(a) + std::fabs(b));
  };
  for (std::uint64_t seed = 5'000'001; seed <= 5'000'200; ++seed) {
    const AttentionData data(random_case(seed, 100'000));
    INFO(to_line(data.attention_case()));
    const Placement placement(data, Device::cuda);
    const Reference host = reference(data.host_problem());
    const Reference device = reference_on_device(placement.problem);
    CHECK(host.keys == device.keys);
    CHECK(host.position == device.position);
    CHECK(std::equal(host.lse.begin(), host.lse.end(), device.lse.begin(), close));
    CHECK(std::equal(host.score_magnitude.begin(), host.score_magnitude.end(), device.score_magnitude.begin(), close));
    CHECK(std::equal(host.value_total.begin(), host.value_total.end(), device.value_total.begin(), close));
    for (std::size_t i = 0; i < host.output.size(); ++i) {
      const bool same = close(host.value_magnitude[i], device.value_magnitude[i]) &&
                        (close(host.output[i], device.output[i]) ||
                         std::fabs(host.output[i] - device.output[i]) <= 1e-11 * host.value_magnitude[i]);
      if (!same) {
        FAIL_CHECK("element " << i << ": " << device.output[i] << ", not " << host.output[i]);
        break;
      }
    }
  }
}

TEST_CASE("Bits that differ are found where the answer is exact") {
  AttentionCase c = parse_case("query_heads=2 keys=1 head_dim=3");
  const Reference expected = reference(AttentionData(c).host_problem());
  Result result = perfect(expected, DataType::float32);
  CHECK(first_bit_difference(result, expected, DataType::float32) == "");
  const double value = decode(DataType::float32, result.output.data(), 4);
  set_output(result, 4, std::nextafter(static_cast<float>(value), 2.0f));
  CHECK(first_bit_difference(result, expected, DataType::float32) != "");
  set_output(result, 4, NAN);
  CHECK(first_bit_difference(result, expected, DataType::float32) != "");
  CHECK(first_bit_difference(perfect(expected, DataType::float16), expected, DataType::float32) != "");
  result = perfect(expected, DataType::float32);
  result.output.resize(result.output.size() - 4);
  CHECK(first_bit_difference(result, expected, DataType::float32) != "");
}

TEST_CASE("What is written into a gap, a guard or an input is found") {
  const AttentionData data(parse_case("batch=2 query_heads=2 keys=5 head_dim=4 output=bh+2@3"));
  Placement placement(data, Device::cpu);
  placement.poison_results(Fill::nan);
  CHECK_NOTHROW(placement.results());
  const auto spoil = [&](void* at) {
    auto* byte = static_cast<unsigned char*>(at);
    const unsigned char before = *byte;
    *byte = static_cast<unsigned char>(before + 1);
    CHECK_THROWS(placement.results());
    *byte = before;
    CHECK_NOTHROW(placement.results());
  };
  float* output = static_cast<float*>(placement.problem.output);
  spoil(output - 1);                               // before the first row
  spoil(output + 4);                               // between the first two
  spoil(output + 6 * 4);                           // the guard
  spoil(output - 3 - 512);                         // the first guard's first element
  spoil(placement.problem.lse - 1);                // its guard
  spoil(const_cast<void*>(placement.problem.key)); // an input
}

TEST_CASE("The line of a case reads back as the same case") {
  AttentionCase c =
      parse_case("dtype=bfloat16 key=b2sh/h+3@1 mask=kbh page_size=16 scale=0.1 mask_keep=0.1 fill=byte_7f");
  c.scale = 1 / std::sqrt(96.0f);
  CHECK(c.key == Layout{"b2sh", "h", 3, 1});
  CHECK(parse_case(to_line(c)) == c);
  CHECK(to_line(AttentionCase()) == "");
  CHECK_THROWS(parse_case("no_such_field=1"));
  CHECK_THROWS(parse_case("batch=two"));
  CHECK_THROWS(parse_case("dtype=int8"));
}

TEST_CASE("Elements encode to the nearest number, ties to even") {
  CHECK(rounded(DataType::float16, 1 + 0x1p-11) == 1);
  CHECK(rounded(DataType::float16, 1 + 0x3p-11) == 1 + 0x1p-9);
  CHECK(rounded(DataType::float16, 65519.9) == 65504);
  CHECK(rounded(DataType::float16, 65520) == INFINITY);
  CHECK(rounded(DataType::float16, 0x1p-24) == 0x1p-24);
  CHECK(rounded(DataType::float16, 0x1p-25) == 0);
  CHECK(rounded(DataType::bfloat16, -1 - 0x1.8p-8) == -1 - 0x1p-7);
  CHECK(rounded(DataType::bfloat16, 133120) == 133120);
  CHECK(std::isnan(rounded(DataType::bfloat16, NAN)));
}

} // namespace single_query::test
