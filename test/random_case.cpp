#include "random_case.h"

#include "element.h"

#include <algorithm>
#include <cmath>

namespace single_query::test {
namespace {

std::string shuffled(Random& random, std::string letters) {
  for (std::size_t i = letters.size(); i > 1; --i) {
    std::swap(letters[i - 1], letters[random.bits() % i]);
  }
  return letters;
}

// Dense most of the time; otherwise any order of the axes, rows at any pitch and offset, and shared axes.
Layout random_layout(Random& random, const std::string& order, bool may_share) {
  Layout layout = {order};
  if (random.chance(0.5)) {
    return layout;
  }
  layout.order = shuffled(random, order);
  layout.pad = random.chance(0.4) ? random.one_of({1, 2, 3, 8, 16, 40}) : 0;
  layout.offset = random.chance(0.4) ? random.one_of({1, 2, 3, 4, 8, 13}) : 0;
  for (const char axis : order) {
    if (may_share && random.chance(0.1)) {
      layout.shared += axis;
    }
  }
  return layout;
}

std::int64_t random_head_dim(Random& random) {
  return random.chance(0.5) ? random.one_of({64, 128, 128, 96, 80, 256, 32, 192, 112})
                            : random.integer(1, random.one_of({16, 64, 256}));
}

// 0, 1, small and odd ones, powers of two and both their neighbours, anything up to 70,000.
std::int64_t random_keys(Random& random, std::int64_t most) {
  most = std::min<std::int64_t>(most, 70000);
  const std::int64_t power = std::int64_t{1} << random.integer(0, 16);
  const std::int64_t any = static_cast<std::int64_t>(std::exp(random.uniform(0, std::log(static_cast<double>(most)))));
  return std::clamp<std::int64_t>(
      random.one_of<std::int64_t>({0, random.integer(1, 8), power, power - 1, power + 1, any, any, any, any, most}), 0,
      most);
}

void random_sizes(Random& random, AttentionCase& c, std::int64_t budget) {
  c.head_dim = random_head_dim(random);
  const std::int64_t group = random.one_of({1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 12, 16, 17, 32, 64, 128});
  c.kv_heads = random.one_of({1, 1, 2, 2, 3, 4, 8});
  c.batch = random.chance(0.02) ? 0 : random.one_of({1, 1, 1, 2, 2, 3, 4, 7, 16, 33});
  c.query_heads = c.kv_heads * group;
  // What the reference has to do is one product per query head, key and element.
  const std::int64_t per_batch = c.query_heads * c.head_dim;
  c.batch = std::min(c.batch, std::max<std::int64_t>(budget / 16 / per_batch, 1));
  c.keys = random_keys(random, std::max<std::int64_t>(budget / (std::max<std::int64_t>(c.batch, 1) * per_batch), 4));
}

// Magnitudes whose scores stay finite in float32, up to where they nearly do not.
void random_magnitudes(Random& random, AttentionCase& c) {
  const double largest = format_of(c.dtype).largest;
  const auto head_dim = static_cast<double>(c.head_dim);
  const double usual = 1 / std::sqrt(head_dim);
  c.scale = static_cast<float>(
      random.one_of({usual, usual, usual, usual, -usual, 0.0, 1.0, random.uniform(-2, 2), 1e-3, 0.125}));
  const auto magnitude = [&](double most) {
    return std::min(std::exp(random.uniform(std::log(1e-4), std::log(1e3))), most);
  };
  c.query_magnitude = random.chance(0.6) ? 1 : magnitude(largest / 2);
  c.key_magnitude = random.chance(0.6) ? random.one_of({1.0, 1.0, 4.0, 20.0}) : magnitude(largest / 2);
  c.value_magnitude = random.chance(0.7) ? 1 : random.chance(0.2) ? largest * 0.9 : magnitude(largest * 0.9);
  c.value_mean = random.chance(0.1) ? 100 : 0;
  if (c.value_magnitude > largest * 0.5) {
    c.value_mean = 0;
  }
  if (random.chance(0.04)) { // dot products near the end of float32, or of float16's own range
    const double end = c.dtype == DataType::float16 ? largest / 2 : 1e18;
    c.query_magnitude = end;
    c.key_magnitude = std::min(end, 1e37 / head_dim / end);
  }
}

void random_rows(Random& random, AttentionCase& c) {
  const auto use = [&](double probability, const std::string& order, bool may_share) {
    return random.chance(probability) ? random_layout(random, order, may_share) : Layout();
  };
  const bool paged = random.chance(0.35);
  if (paged) {
    c.page_size = random.one_of<std::int64_t>({1, 2, 7, 16, 16, 16, 32, 64, 100, 128, 256, random.integer(1, 256)});
    c.page_table = random_layout(random, "bp", false);
    c.spare_pages = random.integer(0, 3);
    if (c.keys == 0) {
      c.keys = 1;
    }
  }
  c.lengths = use(paged ? 1 : 0.5, "b", false);
  c.lengths_type = random.chance(0.5) ? LengthType::int64 : LengthType::int32;
  c.length_kind =
      random.one_of({LengthKind::random, LengthKind::random, LengthKind::full, LengthKind::brief, LengthKind::mixed});
  if (random.chance(0.2)) {
    c.window = random.one_of<std::int64_t>(
        {1, random.integer(1, 64), random.integer(1, std::max<std::int64_t>(c.keys, 1)), c.keys + 1, 4096});
  }
  c.softcap = random.chance(0.2) ? static_cast<float>(random.one_of({1.0, 30.0, 50.0, 0.1})) : 0.0f;
  c.alibi = use(0.2, "bh", true);
  c.mask = use(0.25, "bhk", true);
  c.mask_type =
      random.one_of({MaskType::boolean, MaskType::boolean, MaskType::float32, MaskType::float16, MaskType::bfloat16});
  c.mask_keep = random.one_of({0.5, 0.9, 0.1, 0.01});
  c.sinks = use(0.2, "h", true);
  if (random.chance(0.3)) {
    c.split_size = random.one_of<std::int64_t>({1, 16, 64, 100, 128, 256, 512, 1000, 4096, 100000});
    c.split_size = std::max(c.split_size, c.capacity() / 64);
  }
}

} // namespace

AttentionCase random_case(std::uint64_t seed, std::int64_t budget) {
  Random random(seed);
  AttentionCase c;
  c.seed = seed;
  c.dtype = random.one_of({DataType::float32, DataType::float16, DataType::bfloat16});
  random_sizes(random, c, budget);
  random_magnitudes(random, c);
  random_rows(random, c);
  c.query = random_layout(random, "bh", true);
  c.key = random_layout(random, "bhs", true);
  c.value = random_layout(random, "bhs", true);
  if (random.chance(0.3)) {
    c.key = random.one_of<Layout>({{"bsh"}, {"b2sh"}, {"bs2h"}, {"bsh2"}, {"b2hs"}, {"2bsh"}});
    c.value = c.key.order == "bsh" ? c.key : Layout{"bhs"};
  }
  c.output = random_layout(random, "bh", false);
  c.lse = random_layout(random, "bh", false);
  c.garbage_strides = random.chance(0.3);
  c.specials = random.chance(0.05) ? random.integer(1, 4) : 0;
  c.fill = random.one_of({Fill::nan, Fill::nan, Fill::infinity, Fill::byte_7f});
  c.evicted = c.page_size > 0 && !c.mask.order.empty() && random.chance(0.5);
  c.guarded = c.batch == 0 || random.chance(0.75); // memory of no bytes is null, and null is an absent tensor
  return c;
}

} // namespace single_query::test
