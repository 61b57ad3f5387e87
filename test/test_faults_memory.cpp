// Faults that were reported against other attention code: layouts, addresses, sizes and arguments.
#include "each_device.h"

#include <sys/mman.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

namespace single_query::test {
namespace {

const std::vector<std::string> dtypes = {"dtype=float32 ", "dtype=float16 ", "dtype=bfloat16 "};

// The call is refused with a message that has `name` in it, nothing is written, and the good problem still runs.
void expect_refused(const AttentionData& data, Device device, const std::string& name,
                    const std::function<void(AttentionProblem&)>& spoil) {
  Placement placement(data, device);
  const AttentionProblem good = placement.problem;
  placement.poison_results(Fill::nan);
  const Result before = placement.results();
  spoil(placement.problem);
  std::string message = "nothing thrown";
  try {
    call(placement.problem, device);
  } catch (const Error& error) {
    message = error.what();
    CHECK(error.kind() == Error::Kind::invalid_argument);
  }
  INFO(message);
  CHECK(message.find(name) != std::string::npos);
  placement.problem = good;
  CHECK(same_rows(before, 0, placement.results(), 0, before.rows));
  call(good, device);
  CHECK(compare(placement.results(), reference(data.host_problem()), data.attention_case().dtype,
                weights_on(device, data.attention_case().dtype))
            .passed());
}

// Memory of which little is touched: what the host does not touch, it does not have to have.
class SparseMemory {
public:
  SparseMemory(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
    if (device == Device::cuda) {
      void* data = nullptr;
      data_ = cudaMalloc(&data, bytes) == cudaSuccess ? static_cast<std::byte*>(data) : nullptr;
      cudaGetLastError();
    } else {
      void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      data_ = data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
    }
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() {
    if (device_ == Device::cuda) {
      cudaFree(data_);
    } else if (data_ != nullptr) {
      munmap(data_, bytes_);
    }
  }
  std::byte* data() const { return data_; }
  void upload(const void* from, std::size_t bytes, std::size_t at) {
    if (device_ == Device::cuda) {
      require_cuda(cudaMemcpy(data_ + at, from, bytes, cudaMemcpyHostToDevice));
      require_cuda(cudaStreamSynchronize(nullptr));
    } else {
      std::memcpy(data_ + at, from, bytes);
    }
  }

private:
  Device device_;
  std::size_t bytes_;
  std::byte* data_;
};

std::vector<std::uint16_t> random_halves(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint16_t> halves(count);
  Random random(seed);
  for (std::uint16_t& half : halves) {
    half = static_cast<std::uint16_t>(encode_bits(DataType::float16, random.uniform(-1, 1)));
  }
  return halves;
}

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

// Every row of keys and queries is a window of its own on a short run of numbers, so that rows by the ten thousand cost
// little memory.
void expect_many_rows(Device device, std::int64_t batch, std::int64_t heads, std::int64_t head_dim) {
  AttentionProblem p = contiguous_problem(DataType::float16, batch, heads, heads, 4, head_dim);
  p.query_stride_batch = p.key_stride_page = p.value_stride_page = heads > 1000 ? 0 : 8;
  p.query_stride_head = p.key_stride_head = p.value_stride_head = heads > 1000 ? 8 : head_dim;
  const std::int64_t elements = batch * p.query_stride_batch + heads * p.query_stride_head + 5 * head_dim;
  const std::vector<std::uint16_t> numbers = random_halves(index(elements), 3);
  Memory in(device, numbers.size() * 2);
  in.upload(numbers.data(), numbers.size() * 2);
  Result result = {DataType::float16, batch * heads, head_dim, {}, {}};
  result.output.resize(index(batch * heads * head_dim) * 2);
  result.lse.resize(index(batch * heads));
  Memory out(device, result.output.size());
  Memory lse(device, result.lse.size() * 4);
  p.query = p.key = p.value = in.data();
  p.output = out.data();
  p.lse = reinterpret_cast<float*>(lse.data());
  call(p, device);
  out.download(result.output.data(), result.output.size());
  lse.download(result.lse.data(), result.lse.size() * 4);
  p.query = p.key = p.value = numbers.data();
  const Comparison comparison = compare(result, reference(p), DataType::float16, weights_on(device, DataType::float16));
  INFO(comparison.failure);
  CHECK(comparison.passed());
}

} // namespace

TEST_ON_EACH_DEVICE("A16: an output whose rows lie apart is written in its rows alone") {
  for (const std::string& dtype : dtypes) {
    expect_pass(AttentionData(parse_case(dtype + "batch=4 query_heads=8 kv_heads=2 keys=256 head_dim=64 split_size=64 "
                                                 "output=bh+64 lse=bh+1")),
                device);
  }
}

TEST_ON_EACH_DEVICE("A17 A18 A19 A21: key and value have strides of their own") {
  for (const std::string& dtype : dtypes) {
    for (const char* layout :
         {"keys=16 head_dim=64 key=bhs+64", "query_heads=4 kv_heads=4 keys=33 head_dim=128 value=bsh",
          "query_heads=4 kv_heads=4 keys=33 head_dim=128 key=hsb+1",
          "keys=40 head_dim=64 query_heads=2 kv_heads=2 key=b2sh page_size=16 page_table=bp lengths=b length_kind=full",
          "keys=17 head_dim=46"}) {
      const AttentionData data(parse_case(dtype + layout));
      expect_pass(data, device);
      expect_same_as_slice(data, 0, device);
    }
  }
}

TEST_ON_EACH_DEVICE("A20: tensors that start at an odd element give the right result") {
  for (const char* dtype : {"dtype=bfloat16 ", "dtype=float16 ", "dtype=float32 "}) {
    for (const char* layout : {"query=bh@1", "key=bhs@1", "value=bhs@1", "output=bh@1", "key=bhs@3 value=bhs@5"}) {
      AttentionCase c = parse_case(std::string(dtype) + "keys=8 head_dim=64 query_heads=2 " + layout);
      expect_pass(AttentionData(c), device);
      c.guarded = false;
      expect_pass(AttentionData(c), device);
    }
  }
}

TEST_ON_EACH_DEVICE("A22: every head_dim gives the right result") {
  for (const std::string& dtype : dtypes) {
    for (int head_dim = 1; head_dim <= 256; ++head_dim) {
      expect_pass(AttentionData(parse_case(
                      dtype + "query_heads=2 keys=8 scale=0.1 guarded=0 head_dim=" + std::to_string(head_dim))),
                  device);
    }
  }
}

TEST_ON_EACH_DEVICE("A23: more than 65,535 batch entries and heads", "[large]") {
  expect_many_rows(device, 65535, 2, 64);
  expect_many_rows(device, 65536, 2, 64);
  expect_many_rows(device, 70001, 1, 33);
  expect_many_rows(device, 1, 65537, 64);
  expect_many_rows(device, 2, 66000, 8);
}

TEST_ON_EACH_DEVICE("A24: offsets past 2^31 elements over the batch", "[large]") {
  constexpr std::int64_t stride = std::int64_t{1} << 30;
  constexpr std::int64_t row = 2 * 128;                                         // keys x head_dim
  const std::vector<std::uint16_t> numbers = random_halves(2 * 3 * 3 * row, 1); // pairs of them are floats as well
  for (const DataType dtype : {DataType::float16, DataType::float32}) {
    const std::size_t element = format_of(dtype).bytes;
    SparseMemory key(device, (2 * stride + row) * element);
    SparseMemory value(device, (2 * stride + row) * element);
    if (key.data() == nullptr || value.data() == nullptr) {
      WARN("not run: " << 4 * stride * element / 1'000'000'000 << " GB of memory are not to be had");
      continue;
    }
    const auto* bytes = reinterpret_cast<const std::byte*>(numbers.data());
    for (std::int64_t b = 0; b < 3; ++b) {
      key.upload(bytes + index(b * row) * element, row * element, index(b * stride) * element);
      value.upload(bytes + index((3 + b) * row) * element, row * element, index(b * stride) * element);
    }
    Memory query(device, 3 * row * element);
    query.upload(bytes + index(6 * row) * element, query.size());
    Memory dense_key(device, 3 * row * element);
    Memory dense_value(device, 3 * row * element);
    dense_key.upload(bytes, dense_key.size());
    dense_value.upload(bytes + index(3 * row) * element, dense_value.size());
    for (const std::int64_t group : {1, 2}) {
      AttentionProblem p = contiguous_problem(dtype, 3, group, 1, 2, 128);
      Result results[2];
      for (const bool strided : {true, false}) {
        Result& result = results[strided];
        result = {dtype, 3 * group, 128, std::vector<std::byte>(index(3 * group * 128) * element),
                  std::vector<float>(index(3 * group))};
        Memory output(device, result.output.size());
        Memory lse(device, result.lse.size() * sizeof(float));
        p.query = query.data();
        p.output = output.data();
        p.lse = reinterpret_cast<float*>(lse.data());
        p.key = strided ? key.data() : dense_key.data();
        p.value = strided ? value.data() : dense_value.data();
        p.key_stride_page = p.value_stride_page = strided ? stride : row;
        call(p, device);
        output.download(result.output.data(), result.output.size());
        lse.download(result.lse.data(), result.lse.size() * sizeof(float));
      }
      CHECK(same_rows(results[0], 0, results[1], 0, 3 * group));
    }
  }
}

TEST_ON_EACH_DEVICE("A25: a page whose offset is past 2^31 elements", "[large]") {
  constexpr std::int64_t pages = 32770;
  constexpr std::int64_t page = 16 * 32 * 128;
  SparseMemory cache(device, pages * page * 2);
  if (cache.data() == nullptr) {
    WARN("not run: 4.3 GB of memory are not to be had");
    return;
  }
  const std::vector<std::uint16_t> numbers = random_halves(page, 1);
  const std::vector<std::uint16_t> query_numbers = random_halves(64 * 128, 2);
  cache.upload(numbers.data(), page * 2, 0);
  cache.upload(numbers.data(), page * 2, (pages - 1) * page * 2);
  Memory query(device, query_numbers.size() * 2);
  query.upload(query_numbers.data(), query.size());
  Memory lengths(device, sizeof(std::int32_t));
  AttentionProblem p = contiguous_problem(DataType::float16, 1, 64, 32, 16, 128);
  p.pages = pages;
  p.key_stride_page = p.value_stride_page = page;
  p.key_stride_slot = p.value_stride_slot = 32 * 128;
  p.key_stride_head = p.value_stride_head = 128;
  for (const std::int32_t length : {13, 16}) { // the page's last slots unused, and a full page
    lengths.upload(&length, sizeof(length));
    Result results[2];
    for (const std::int32_t entry : {0, static_cast<std::int32_t>(pages - 1)}) {
      Memory table(device, sizeof(entry));
      table.upload(&entry, sizeof(entry));
      Result& result = results[entry != 0];
      result = {DataType::float16, 64, 128, std::vector<std::byte>(64 * 128 * 2), std::vector<float>(64)};
      Memory output(device, result.output.size());
      Memory lse(device, 64 * sizeof(float));
      p.query = query.data();
      p.key = p.value = cache.data();
      p.page_table = reinterpret_cast<const std::int32_t*>(table.data());
      p.lengths = lengths.data();
      p.output = output.data();
      p.lse = reinterpret_cast<float*>(lse.data());
      call(p, device);
      output.download(result.output.data(), result.output.size());
      lse.download(result.lse.data(), lse.size());
    }
    CHECK(same_rows(results[0], 0, results[1], 0, 64));
  }
}

TEST_ON_EACH_DEVICE("A27: query heads that are no multiple of the KV heads are refused by name") {
  for (const char* heads : {"query_heads=3", "query_heads=33"}) {
    AttentionData data(parse_case(std::string("keys=5 head_dim=8 ") + heads));
    expect_refused(data, device, "query_heads", [](AttentionProblem& p) { p.kv_heads = 2; });
  }
}

TEST_ON_EACH_DEVICE("A29: lengths of int64 are read as int64") {
  for (const char* type : {"int32", "int64"}) {
    AttentionData data(
        parse_case(std::string("batch=2 keys=9 head_dim=16 lengths=b length_kind=full lengths_type=") + type));
    data.set_length(0, 5);
    data.set_length(1, 7);
    expect_pass(data, device);
    expect_same_as_slice(data, 0, device);
    expect_same_as_slice(data, 1, device);
  }
}

TEST_ON_EACH_DEVICE("A30: a length past the capacity is the capacity") {
  for (const std::string& dtype : dtypes) {
    for (const char* cache : {"keys=8 head_dim=64 ", "keys=32 head_dim=64 page_size=16 page_table=bp "}) {
      for (const std::int64_t past : {std::int64_t{1}, std::int64_t{1} << 33, std::int64_t{0x7fffffffffff}}) {
        AttentionData data(
            parse_case(dtype + cache + "lengths=b length_kind=full lengths_type=int64 guarded=0 query_heads=2"));
        data.set_length(0, data.attention_case().keys + past);
        expect_pass(data, device);
        expect_same_as_slice(data, 0, device);
      }
    }
  }
}

TEST_ON_EACH_DEVICE("A31 A32: page entries past the length, and past the table, are not read") {
  for (const std::string& dtype : dtypes) {
    for (const char* size : {"keys=128 ", "keys=32 "}) {
      for (const std::int32_t garbage : {2147480000, -1, -2147483647}) {
        AttentionData data(
            parse_case(dtype + size + "head_dim=64 page_size=16 page_table=bp lengths=b length_kind=full guarded=0"));
        data.set_length(0, *(size + 5) == '1' ? 20 : 17);
        for (std::int64_t page = 2; page < data.attention_case().max_pages(); ++page) {
          data.set_page(0, page, garbage);
        }
        expect_pass(data, device);
        expect_same_as_slice(data, 0, device);
      }
    }
  }
}

TEST_ON_EACH_DEVICE("A33: shared memory does not grow with the number of keys", "[large]") {
  for (const std::string& dtype : dtypes) {
    const AttentionData data(parse_case(dtype + "keys=65536 head_dim=128 values=zero_keys key=bhs/s value=bhs/s"));
    CHECK(first_bit_difference(run(data, device), reference(data.host_problem()), data.attention_case().dtype) == "");
  }
}

TEST_ON_EACH_DEVICE("A47: tensors of no elements") {
  for (const std::string& dtype : dtypes) {
    expect_pass(AttentionData(parse_case(dtype + "batch=0 query_heads=2 keys=5 head_dim=64")), device);
    expect_pass(AttentionData(parse_case(dtype + "batch=2 query_heads=0 keys=5 head_dim=64")), device);
    expect_pass(AttentionData(parse_case(dtype + "batch=2 query_heads=2 keys=0 head_dim=64")), device);
    const AttentionData data(parse_case(dtype + "query_heads=2 keys=5 head_dim=16"));
    for (const std::int64_t head_dim : {0, -1, 257}) {
      expect_refused(data, device, "head_dim", [&](AttentionProblem& p) { p.head_dim = head_dim; });
    }
  }
}

TEST_ON_EACH_DEVICE("A48: an output that shares memory with anything is refused by name") {
  const AttentionData data(parse_case("batch=2 query_heads=2 keys=40 head_dim=16 lengths=b alibi=bh mask=bhk "
                                      "mask_type=float32 mask_keep=1 sinks=h output=bh+16"));
  const auto refused = [&](const std::function<void(AttentionProblem&)>& spoil) {
    expect_refused(data, device, "output", spoil);
  };
  refused([](AttentionProblem& p) { p.output = const_cast<void*>(p.query); });
  refused([](AttentionProblem& p) { p.output = const_cast<void*>(p.key); });
  refused([](AttentionProblem& p) { p.output = static_cast<float*>(const_cast<void*>(p.value)) + 100; });
  refused([](AttentionProblem& p) { p.output = const_cast<float*>(p.alibi_slopes); });
  refused([](AttentionProblem& p) { p.output = const_cast<void*>(p.attn_mask); });
  refused([](AttentionProblem& p) { p.output = const_cast<void*>(p.lengths); });
  refused([](AttentionProblem& p) { p.output = const_cast<float*>(p.sinks); });
  refused([](AttentionProblem& p) { p.output_stride_head = 15; });
  refused([](AttentionProblem& p) { p.output_stride_batch = 0; });
  expect_refused(data, device, "lse", [](AttentionProblem& p) { p.lse = static_cast<float*>(p.output) + 3; });
  expect_refused(data, device, "lse", [](AttentionProblem& p) { p.lse_stride_head = 0; });
}

TEST_ON_EACH_DEVICE("A48: an output woven between the rows of an input is not refused") {
  // Query and output are the halves of one tensor's rows: they lie between each other and share no element.
  AttentionData data(parse_case("batch=3 query_heads=4 keys=40 head_dim=16 query=bh+16"));
  Placement placement(data, device);
  Result expected = run(data, device);
  AttentionProblem& p = placement.problem;
  p.output = static_cast<float*>(const_cast<void*>(p.query)) + 16;
  p.output_stride_batch = p.query_stride_batch;
  p.output_stride_head = p.query_stride_head;
  p.batch = 2; // the last row has no second half
  p.pages = 2;
  call(p, device);
  for (std::int64_t row = 0; row < 8; ++row) {
    std::array<std::byte, 16 * sizeof(float)> output;
    const float* at = static_cast<const float*>(p.output) + row * 32;
    if (device == Device::cuda) {
      require_cuda(cudaMemcpy(output.data(), at, output.size(), cudaMemcpyDeviceToHost));
    } else {
      std::memcpy(output.data(), at, output.size());
    }
    CHECK(std::equal(output.begin(), output.end(), expected.output.begin() + row * 64));
  }
}

} // namespace single_query::test
