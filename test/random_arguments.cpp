#include "random_arguments.h"

#include <limits>
#include <type_traits>
#include <utility>

namespace single_query::test {
namespace {

// Of any problem: a field, by its name.
template <class Problem>
struct Number {
  const char* name;
  std::int64_t Problem::*member;
};

constexpr Number<AttentionProblem> attention_numbers[] = {
    {"batch", &AttentionProblem::batch},
    {"query_heads", &AttentionProblem::query_heads},
    {"kv_heads", &AttentionProblem::kv_heads},
    {"head_dim", &AttentionProblem::head_dim},
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
    {"pages", &AttentionProblem::pages},
    {"page_size", &AttentionProblem::page_size},
    {"page_table_stride_batch", &AttentionProblem::page_table_stride_batch},
    {"page_table_stride_page", &AttentionProblem::page_table_stride_page},
    {"max_pages", &AttentionProblem::max_pages},
    {"lengths_stride", &AttentionProblem::lengths_stride},
    {"window", &AttentionProblem::window},
    {"alibi_stride_batch", &AttentionProblem::alibi_stride_batch},
    {"alibi_stride_head", &AttentionProblem::alibi_stride_head},
    {"mask_stride_batch", &AttentionProblem::mask_stride_batch},
    {"mask_stride_head", &AttentionProblem::mask_stride_head},
    {"mask_stride_key", &AttentionProblem::mask_stride_key},
    {"sinks_stride", &AttentionProblem::sinks_stride},
    {"split_size", &AttentionProblem::split_size},
};

constexpr Number<MergeProblem> merge_numbers[] = {
    {"parts", &MergeProblem::parts},
    {"batch", &MergeProblem::batch},
    {"heads", &MergeProblem::heads},
    {"head_dim", &MergeProblem::head_dim},
    {"outputs_stride_part", &MergeProblem::outputs_stride_part},
    {"outputs_stride_batch", &MergeProblem::outputs_stride_batch},
    {"outputs_stride_head", &MergeProblem::outputs_stride_head},
    {"lse_stride_part", &MergeProblem::lse_stride_part},
    {"lse_stride_batch", &MergeProblem::lse_stride_batch},
    {"lse_stride_head", &MergeProblem::lse_stride_head},
    {"output_stride_batch", &MergeProblem::output_stride_batch},
    {"output_stride_head", &MergeProblem::output_stride_head},
    {"output_lse_stride_batch", &MergeProblem::output_lse_stride_batch},
    {"output_lse_stride_head", &MergeProblem::output_lse_stride_head},
};

std::int64_t bad_number(Random& random, std::int64_t good) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t one = 1;
  const auto bits = static_cast<std::uint64_t>(good); // sums and products wrap
  const auto near_good = static_cast<std::int64_t>(random.one_of({bits + 1, bits - 1, 2 * bits, bits / 2, 0 - bits}));
  return random.one_of<std::int64_t>({-1,
                                      0,
                                      1,
                                      2,
                                      3,
                                      near_good,
                                      near_good,
                                      near_good,
                                      most,
                                      most - 1,
                                      -most - 1,
                                      most / 2,
                                      most / 4 + 1,
                                      most / 8,
                                      one << 31,
                                      (one << 31) - 1,
                                      one << 32,
                                      one << 33,
                                      one << 62,
                                      one << 61,
                                      one << 60,
                                      random.integer(0, 300),
                                      static_cast<std::int64_t>(random.bits())});
}

void* bad_pointer(Random& random, Arena& arena, const void* good) {
  const auto at = reinterpret_cast<std::uintptr_t>(good);
  const auto size = static_cast<std::int64_t>(Arena::bytes);
  return reinterpret_cast<void*>(random.one_of<std::uintptr_t>(
      {0, at + 1, at + 2, at + 4, at - 4, arena.start() + static_cast<std::uintptr_t>(random.integer(0, size)),
       arena.start() + static_cast<std::uintptr_t>(random.integer(0, size / 16) * 16), arena.start(),
       arena.start() + Arena::bytes - 4, 8, std::uintptr_t{1} << 63, ~std::uintptr_t{0}, ~std::uintptr_t{7},
       ~std::uintptr_t{63}}));
}

template <class Problem, std::size_t count>
void spoil_number(Random& random, const Number<Problem> (&numbers)[count], Problem& problem) {
  std::int64_t& number = problem.*numbers[random.bits() % count].member;
  number = bad_number(random, number);
}

// Strides of axes of these sizes, the last one innermost, over runs of `run` elements: dense, in another order, with
// gaps, shared, or anything small. Returns how many elements they span.
std::int64_t random_strides(Random& random, std::int64_t run,
                            std::vector<std::pair<std::int64_t, std::int64_t*>> axes) {
  const bool any = random.chance(0.1);
  if (random.chance(0.3)) {
    std::swap(axes[random.bits() % axes.size()], axes.back());
  }
  std::int64_t span = run + (random.chance(0.2) ? random.integer(0, 9) : 0);
  std::reverse(axes.begin(), axes.end());
  for (const auto& [size, stride] : axes) {
    *stride = any ? random.integer(0, 2 * span) : span;
    span += std::max<std::int64_t>(size - 1, 0) * *stride;
  }
  return span;
}

} // namespace

void* Arena::take(Random& random, std::int64_t size) {
  const std::int64_t gap = random.one_of({0, 0, 4, 8, 64});
  if (used_ + gap + size > static_cast<std::int64_t>(bytes)) {
    used_ = 0;
  }
  void* taken = begin() + used_ + gap;
  used_ = (used_ + gap + size + 7) / 8 * 8;
  return taken;
}

AttentionProblem good_attention(Random& random, Arena& arena) {
  AttentionProblem p;
  p.dtype = random.one_of({DataType::float32, DataType::float16, DataType::bfloat16});
  p.batch = random.one_of({0, 1, 1, 2, 2, 3});
  p.kv_heads = random.integer(1, 2);
  p.query_heads = p.kv_heads * random.integer(1, 3);
  p.head_dim = random.one_of({1, 2, 3, 5, 8, 13, 16, 17});
  p.page_size = random.integer(0, 5);
  p.pages = p.batch;
  p.scale = 0.5f;
  const std::int64_t bytes = element_bytes_of(p.dtype);
  if (random.chance(0.3)) {
    p.page_size = random.integer(1, 4);
    p.max_pages = random.integer(0, 3);
    p.pages = random.integer(0, 4);
    const std::int64_t span =
        random_strides(random, 1, {{p.batch, &p.page_table_stride_batch}, {p.max_pages, &p.page_table_stride_page}});
    auto* table = static_cast<std::int32_t*>(arena.take(random, 4 * span));
    std::generate(table, table + span, [&] { return static_cast<std::int32_t>(random.integer(-1, p.pages)); });
    p.page_table = table;
  }
  const std::int64_t capacity = p.max_pages * p.page_size;
  if (p.page_table != nullptr || random.chance(0.4)) {
    p.lengths_type = random.one_of({LengthType::int32, LengthType::int64});
    const std::int64_t span = random_strides(random, 1, {{p.batch, &p.lengths_stride}});
    auto* lengths = static_cast<unsigned char*>(arena.take(random, 8 * span));
    std::fill(lengths, lengths + 8 * span, static_cast<unsigned char>(0));
    std::generate(lengths, lengths + 4 * span, [&] { return static_cast<unsigned char>(random.chance(0.1)); });
    p.lengths = lengths;
  }
  p.query = arena.take(
      random, bytes * random_strides(random, p.head_dim,
                                     {{p.batch, &p.query_stride_batch}, {p.query_heads, &p.query_stride_head}}));
  p.output = arena.take(
      random, bytes * random_strides(random, p.head_dim,
                                     {{p.batch, &p.output_stride_batch}, {p.query_heads, &p.output_stride_head}}));
  p.key = arena.take(random, bytes * random_strides(random, p.head_dim,
                                                    {{p.pages, &p.key_stride_page},
                                                     {p.kv_heads, &p.key_stride_head},
                                                     {p.page_size, &p.key_stride_slot}}));
  p.value = arena.take(random, bytes * random_strides(random, p.head_dim,
                                                      {{p.pages, &p.value_stride_page},
                                                       {p.kv_heads, &p.value_stride_head},
                                                       {p.page_size, &p.value_stride_slot}}));
  const auto floats = [&](double probability, std::vector<std::pair<std::int64_t, std::int64_t*>> axes) -> float* {
    const std::int64_t span = random_strides(random, 1, std::move(axes));
    return random.chance(probability) ? static_cast<float*>(arena.take(random, 4 * span)) : nullptr;
  };
  p.lse = floats(0.5, {{p.batch, &p.lse_stride_batch}, {p.query_heads, &p.lse_stride_head}});
  p.alibi_slopes = floats(0.3, {{p.batch, &p.alibi_stride_batch}, {p.query_heads, &p.alibi_stride_head}});
  p.mask_type = random.one_of({MaskType::boolean, MaskType::float32, MaskType::float16, MaskType::bfloat16});
  p.attn_mask = floats(
      0.3, {{p.batch, &p.mask_stride_batch}, {p.query_heads, &p.mask_stride_head}, {capacity, &p.mask_stride_key}});
  p.sinks = floats(0.3, {{p.query_heads, &p.sinks_stride}});
  p.softcap = random.chance(0.2) ? 5.0f : 0.0f;
  p.window = random.chance(0.2) ? random.integer(1, 4) : 0;
  p.split_size = random.chance(0.3) ? random.one_of<std::int64_t>({1, 3, 128, 1000}) : 0;
  return p;
}

MergeProblem good_merge(Random& random, Arena& arena) {
  MergeProblem p;
  p.dtype = random.one_of({DataType::float32, DataType::float16, DataType::bfloat16});
  p.parts = random.integer(0, 4);
  p.batch = random.integer(0, 3);
  p.heads = random.integer(0, 4);
  p.head_dim = random.one_of({1, 2, 3, 5, 8, 13, 16, 17});
  const std::int64_t bytes = element_bytes_of(p.dtype);
  p.outputs = arena.take(random, bytes * random_strides(random, p.head_dim,
                                                        {{p.parts, &p.outputs_stride_part},
                                                         {p.batch, &p.outputs_stride_batch},
                                                         {p.heads, &p.outputs_stride_head}}));
  p.output =
      arena.take(random, bytes * random_strides(random, p.head_dim,
                                                {{p.batch, &p.output_stride_batch}, {p.heads, &p.output_stride_head}}));
  p.lse = static_cast<const float*>(arena.take(
      random, 4 * random_strides(
                      random, 1,
                      {{p.parts, &p.lse_stride_part}, {p.batch, &p.lse_stride_batch}, {p.heads, &p.lse_stride_head}})));
  const std::int64_t span =
      random_strides(random, 1, {{p.batch, &p.output_lse_stride_batch}, {p.heads, &p.output_lse_stride_head}});
  p.output_lse = random.chance(0.5) ? static_cast<float*>(arena.take(random, 4 * span)) : nullptr;
  return p;
}

void spoil(Random& random, Arena& arena, AttentionProblem& p) {
  const auto pointer = [&](auto*& data) {
    data = static_cast<std::remove_reference_t<decltype(data)>>(bad_pointer(random, arena, data));
  };
  const auto float_number = [&](float& number) {
    number = random.one_of({-1.0f, 0.0f, 1e38f, std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()});
  };
  switch (random.integer(0, 17)) {
  case 0:
    return pointer(p.query);
  case 1:
    return pointer(p.output);
  case 2:
    return pointer(p.key);
  case 3:
    return pointer(p.value);
  case 4:
    return pointer(p.lse);
  case 5:
    return pointer(p.page_table);
  case 6:
    return pointer(p.lengths);
  case 7:
    return pointer(random.chance(0.5) ? p.alibi_slopes : p.sinks);
  case 8:
    return pointer(p.attn_mask);
  case 9:
    return float_number(random.chance(0.5) ? p.scale : p.softcap);
  case 10:
    p.dtype = static_cast<DataType>(random.one_of({-1, 0, 1, 2, 3, 1 << 30}));
    return;
  case 11:
    p.mask_type = static_cast<MaskType>(random.one_of({-1, 0, 1, 2, 3, 4, 1 << 30}));
    return;
  case 12:
    p.lengths_type = static_cast<LengthType>(random.one_of({-1, 0, 1, 2, 1 << 30}));
    return;
  default:
    spoil_number(random, attention_numbers, p);
    if (p.page_table == nullptr && random.chance(0.5)) {
      p.pages = p.batch;
    }
  }
}

void spoil(Random& random, Arena& arena, MergeProblem& p) {
  const auto pointer = [&](auto*& data) {
    data = static_cast<std::remove_reference_t<decltype(data)>>(bad_pointer(random, arena, data));
  };
  switch (random.integer(0, 9)) {
  case 0:
    return pointer(p.outputs);
  case 1:
    return pointer(p.lse);
  case 2:
    return pointer(p.output);
  case 3:
    return pointer(p.output_lse);
  case 4:
    p.dtype = static_cast<DataType>(random.one_of({-1, 0, 1, 2, 3, 1 << 30}));
    return;
  default:
    spoil_number(random, merge_numbers, p);
  }
}

} // namespace single_query::test
