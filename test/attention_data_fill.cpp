// What the tensors of a case hold.
#include "attention_data.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace single_query::test {

AttentionData::AttentionData(const AttentionCase& attention_case) : case_(attention_case) {
  lay_out();
  Random random(case_.seed);
  fill_lengths(random);
  fill_page_table(random);
  fill_mask(random);
  evict_pages(random);
  fill_modifiers(random);
  fill_query_and_cache(random);
  place_specials(random);
}

void AttentionData::fill_lengths(Random& random) {
  lengths_.assign(static_cast<std::size_t>(case_.batch), case_.capacity());
  for (std::int64_t b = 0; b < case_.batch && !case_.lengths.order.empty(); ++b) {
    const std::int64_t capacity = case_.capacity();
    std::int64_t length = random.integer(0, capacity);
    if (case_.length_kind == LengthKind::full) {
      length = capacity;
    } else if (case_.length_kind == LengthKind::brief) {
      length = std::min<std::int64_t>(capacity, random.integer(0, 8));
    } else if (case_.length_kind == LengthKind::mixed) {
      length = random.one_of<std::int64_t>(
          {0, 1, capacity, capacity + random.integer(1, 1000), -random.integer(1, 1000), length, length});
    }
    set_length(b, length);
  }
}

void AttentionData::fill_page_table(Random& random) {
  if (case_.page_size == 0) {
    return;
  }
  assigned_.assign(static_cast<std::size_t>(case_.batch * case_.max_pages()), 0);
  free_pages_.resize(static_cast<std::size_t>(layout_.pages));
  std::iota(free_pages_.begin(), free_pages_.end(), 0);
  for (std::size_t i = free_pages_.size(); i > 1; --i) {
    std::swap(free_pages_[i - 1], free_pages_[random.bits() % i]);
  }
  for (std::int64_t b = 0; b < case_.batch; ++b) {
    assign_pages(b);
  }
}

void AttentionData::assign_pages(std::int64_t b) {
  const std::int64_t end = (length(b) + case_.page_size - 1) / case_.page_size;
  for (std::int64_t page = first_key(b) / case_.page_size; page < end; ++page) {
    char& assigned = assigned_[static_cast<std::size_t>(b * case_.max_pages() + page)];
    if (assigned == 0) {
      assigned = 1;
      set_page(b, page, free_pages_.back());
      free_pages_.pop_back();
    }
  }
}

void AttentionData::fill_mask(Random& random) {
  for (std::int64_t b = 0; b < case_.batch && !case_.mask.order.empty(); ++b) {
    for (std::int64_t h = 0; h < case_.query_heads; ++h) {
      const double keep = random.one_of({case_.mask_keep, case_.mask_keep, case_.mask_keep, 0.0, 1.0});
      for (std::int64_t n = first_key(b); n < length(b); ++n) {
        const bool in = random.chance(keep);
        const double added = random.chance(0.05) ? -1e4 : random.uniform(-4, 4);
        set_mask(b, h, n, case_.mask_type == MaskType::boolean ? in : in ? added : -INFINITY);
      }
    }
  }
}

void AttentionData::evict_pages(Random& random) {
  const std::int64_t size = case_.page_size;
  for (std::int64_t b = 0; b < case_.batch && case_.evicted && size > 0; ++b) {
    for (std::int64_t page = first_key(b) / size; page * size < length(b); ++page) {
      bool used = false;
      const std::int64_t end = std::min(length(b), (page + 1) * size);
      for (std::int64_t n = std::max(first_key(b), page * size); n < end; ++n) {
        for (std::int64_t h = 0; h < case_.query_heads; ++h) {
          used = used || takes_part(b, h, n);
        }
      }
      if (!used) {
        set_page(
            b, page,
            random.one_of({-1, static_cast<std::int32_t>(layout_.pages), std::numeric_limits<std::int32_t>::max()}));
      }
    }
  }
}

void AttentionData::fill_modifiers(Random& random) {
  for (std::int64_t h = 0; h < case_.query_heads; ++h) {
    for (std::int64_t b = 0; b < case_.batch && !case_.alibi.order.empty(); ++b) {
      set_alibi_slope(b, h, static_cast<float>(random.chance(0.1) ? 0 : random.uniform(-0.05, 0.5)));
    }
    if (!case_.sinks.order.empty()) {
      const double sink = random.uniform(-3, 3);
      set_sink(h, static_cast<float>(random.one_of({sink, sink, sink, sink * 20, -double(INFINITY)})));
    }
  }
}

void AttentionData::fill_query_and_cache(Random& random) {
  const AttentionCase& c = case_;
  const auto fill_row = [&](Tensor tensor, std::int64_t row, double mean, double magnitude) {
    for (std::int64_t d = 0; d < c.head_dim; ++d) {
      set(tensor, row + d, mean + random.uniform(-magnitude, magnitude));
    }
  };
  const bool one_hot = c.values == Values::one_hot;
  const double key_magnitude = c.values == Values::random ? c.key_magnitude : 0;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.query_heads; ++h) {
      fill_row(Tensor::query, query_row(b, h), 0, c.query_magnitude);
      if (one_hot) {
        set_query(b, h, 0, 256);
      }
    }
    for (std::int64_t kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
      const std::int64_t group = c.query_heads / c.kv_heads;
      const std::int64_t hot = one_hot && first_key(b) < length(b) ? random.integer(first_key(b), length(b) - 1) : -1;
      for (std::int64_t n = first_key(b); n < length(b); ++n) {
        bool used = c.mask.order.empty();
        for (std::int64_t h = kv_head * group; !used && h < (kv_head + 1) * group; ++h) {
          used = takes_part(b, h, n);
        }
        if (!used) {
          continue;
        }
        fill_row(Tensor::key, key_row(b, kv_head, n), 0, key_magnitude);
        if (n == hot) {
          set_key(b, kv_head, n, 0, 64);
        }
        if (c.values == Values::zero_keys) {
          for (std::int64_t d = 0; d < c.head_dim; ++d) {
            set_value(b, kv_head, n, d, static_cast<double>(random.integer(-8, 8)));
          }
        } else {
          fill_row(Tensor::value, value_row(b, kv_head, n), c.value_mean, c.value_magnitude);
        }
      }
    }
  }
}

void AttentionData::place_specials(Random& random) {
  for (std::int64_t i = 0; i < case_.specials && case_.batch * case_.query_heads > 0; ++i) {
    const std::int64_t b = random.integer(0, case_.batch - 1);
    const std::int64_t h = random.integer(0, case_.query_heads - 1);
    const std::int64_t kv_head = h / (case_.query_heads / case_.kv_heads);
    const std::int64_t d = random.integer(0, case_.head_dim - 1);
    const double special = random.one_of<double>({NAN, INFINITY, -INFINITY});
    const std::int64_t n = random.integer(0, std::max<std::int64_t>(length(b) - 1, 0));
    const std::int64_t which = random.integer(0, 4);
    if (which == 0) {
      set_query(b, h, d, special);
    } else if (takes_part(b, h, n)) {
      which < 3 ? set_value(b, kv_head, n, d, special) : set_key(b, kv_head, n, d, special);
    }
  }
}

} // namespace single_query::test
