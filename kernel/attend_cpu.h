// The inner functions of the host twins, written once over `Vector`, see vector_cpu.h: included by the one source of
// each instruction set.
//
// A task walks its keys in blocks. For each block: gather where its rows lie, dot products with every query head while
// a key row is in the L1 cache, score pipeline and softmax weights, then the weighted sum of value rows, kept in
// registers over the whole block. Every lane adds in the order of the keys and every dot product in one order of its
// own, whatever the tiles, pages and neighbours are: a row's bits depend on its own numbers alone.
#pragma once

#include "vector_cpu.h"

namespace single_query {
namespace {

constexpr int chain_rows = 16; // value rows that all heads use up at once: a chain of additions, see chain_length
constexpr int rows_ahead = 32; // how far ahead rows are asked for, see row_ahead()
constexpr int tile_sums = 8;   // vectors of sums that a tile keeps in registers
constexpr int padded_head_dim = static_cast<int>(max_head_dim);
constexpr int block_size = static_cast<int>(block_keys);

// The head_dim elements of a row as vectors: the last one ends where the row ends and repeats lanes of the one before
// where head_dim is no multiple of `lanes`, so that nothing past a row is read.
struct RowVectors {
  explicit RowVectors(int head_dim) : count((head_dim + lanes - 1) / lanes), last_offset(head_dim - lanes) {
    for (int i = 0; i < lanes; ++i) {
      fresh_lanes[i] = last_offset + i >= (count - 1) * lanes ? ~0u : 0u;
    }
  }
  int offset(int vector) const { return vector + 1 < count ? vector * lanes : last_offset; }
  // The last vector of a row with zeros for the lanes that repeat others.
  Vector fresh(const Vector& last) const {
    return reinterpret_cast<Vector>(reinterpret_cast<Unsigned>(last) & fresh_lanes);
  }

  int count;
  int last_offset;
  Unsigned fresh_lanes; // of the last vector: those that repeat nothing
};

// The keys of one block that take part, in order.
template <typename Element>
struct Block {
  int count;
  bool modified;                       // distance and mask are filled in and to be looked at
  const Element* key_rows[block_size]; // filled up to a multiple of tile_sums with copies of the last
  const Element* value_rows[block_size];
  float distance[block_size]; // from the newest key of the row, <= 0
  float mask[block_size];     // 0 where there is none
};

// Of every query head of a task. Values lie vector by vector, see RowVectors.
struct TaskState {
  alignas(64) float query[most_task_heads][padded_head_dim];
  alignas(64) float values[most_task_heads][padded_head_dim];
  alignas(64) float block_values[most_task_heads][padded_head_dim]; // between blocks: the rest, see add_chain()
  alignas(64) float scores[most_task_heads][block_size];            // then weights times the value scale
  float max_score[most_task_heads];
  float sum_exp[most_task_heads];
  float sum_rest[most_task_heads];
  float rescale[most_task_heads]; // of the values so far, for the block in hand
  ScoreModifiers modifiers[most_task_heads];
};

// Rows are asked for while earlier ones are used, a line at a time between the sums: requests in a row would stop the
// sums until the memory has taken them all. Every pass over a tile's rows asks, though the first one would do: a second
// instance of the tiles, without requests, costs more, since they are no longer inlined then.
//
// Which row to ask for at row `position` of a block's key rows and then its value rows.
template <typename Element>
inline const Element* row_ahead(const Block<Element>& block, int position) {
  const int ahead = position + rows_ahead;
  const int value = ahead - block.count;
  return value < 0 ? block.key_rows[ahead] : block.value_rows[value < block.count ? value : block.count - 1];
}

// Ask for the line of element d, a multiple of `lanes`, of a row or of a tile's part of it: once a line. Into the L2
// cache: rows that are a power of two apart drive each other out of the first.
template <typename Element>
inline void prefetch(const Element* row, int d) {
  constexpr int line = 64 / static_cast<int>(sizeof(Element));
  if (d % line == 0) {
    __builtin_prefetch(row + d, 0, 2);
  }
}

// scores[head + h, row + k] = dot(query[head + h], key_rows[row + k]) for `heads` heads and tile_sums / heads rows.
template <int heads, typename Element>
inline void dot_tile(const RowVectors& vectors, const Block<Element>& block, int row, int head, TaskState& state) {
  constexpr int keys = tile_sums / heads;
  const int last = (vectors.count - 1) * lanes;
  const Element* const* rows = block.key_rows + row;
  const float(*query)[padded_head_dim] = state.query + head;
  const Element* ahead[keys];
  for (int k = 0; k < keys; ++k) {
    ahead[k] = row_ahead(block, row + k);
  }
  Vector sums[tile_sums];
  clear(sums);
  for (int d = 0; d < last; d += lanes) {
    for (int k = 0; k < keys; ++k) {
      prefetch(ahead[k], d);
      const Vector key = load(rows[k] + d);
      for (int h = 0; h < heads; ++h) {
        sums[h * keys + k] += key * load(query[h] + d);
      }
    }
  }
  for (int k = 0; k < keys; ++k) {
    prefetch(ahead[k], last);
    const Vector key = vectors.fresh(load(rows[k] + vectors.last_offset));
    for (int h = 0; h < heads; ++h) {
      sums[h * keys + k] += key * load(query[h] + last);
    }
  }
  float dots[tile_sums];
  sum_lanes(sums, dots);
  for (int h = 0; h < heads; ++h) {
    std::memcpy(state.scores[head + h] + row, dots + h * keys, keys * sizeof(float));
  }
}

// The same for rows k .. k + tile_sums - 1 of a block and heads first .. end - 1, `heads` at a time and then fewer.
template <int heads, typename Element>
inline void dot_rows(const RowVectors& vectors, const Block<Element>& block, int k, int first, int end,
                     TaskState& state) {
  for (; first + heads <= end; first += heads) {
    for (int row = k; row < k + tile_sums && row < block.count; row += tile_sums / heads) {
      dot_tile<heads>(vectors, block, row, first, state);
    }
  }
  if constexpr (heads > 1) {
    dot_rows<heads / 2>(vectors, block, k, first, end, state);
  }
}

// Scores of head h become weights; max_score and sum_exp take the block in.
template <typename Element>
inline void weigh_scores(const Block<Element>& block, int h, float value_scale, TaskState& state) {
  float* scores = state.scores[h];
  const ScoreModifiers modifiers = state.modifiers[h];
  if (block.modified) {
    for (int k = 0; k < block.count; ++k) {
      scores[k] = modified_score(modifiers, scores[k], block.distance[k], block.mask[k]);
    }
  } else {
    for (int k = 0; k < block.count; ++k) {
      scores[k] = modified_score({modifiers.scale, 0, 0}, scores[k], 0, 0);
    }
  }
  int count = block.count;
  for (; count % lanes != 0; ++count) {
    scores[count] = negative_infinity;
  }
  Vector largest = broadcast(state.max_score[h]);
  for (int k = 0; k < count; k += lanes) {
    largest = larger(largest, load(scores + k));
  }
  const float max_score = largest_lane(largest);
  const float reference = max_score == negative_infinity ? 0.0f : max_score; // as in softmax_weight()
  Vector sums = {};
  for (int k = 0; k < count; k += lanes) {
    const Vector weights = exp_of_nonpositive(load(scores + k) - reference);
    sums += weights;
    store(scores + k, weights * value_scale);
  }
  state.rescale[h] = softmax_weight(state.max_score[h], max_score);
  state.max_score[h] = max_score;
  float chain = state.sum_rest[h] * state.rescale[h] + sum_of_lanes(sums);
  state.sum_exp[h] = add_chain(state.sum_exp[h] * state.rescale[h], chain);
  state.sum_rest[h] = chain;
}

// block_values[h] += sum_k weights[h, k] rows[k], a chain of rows begin .. end - 1, for `heads` heads and `count`
// vectors of the row from `first` on.
template <int heads, int count, typename Element>
inline void value_tile(const RowVectors& vectors, const Block<Element>& block, int begin, int end, int head, int first,
                       TaskState& state) {
  const int offset = first * lanes;
  const int last_offset = vectors.offset(first + count - 1);
  Vector sums[heads * count];
  clear(sums);
  for (int k = begin; k < end; ++k) {
    const Element* row = block.value_rows[k];
    const Element* ahead = row_ahead(block, block.count + k) + offset;
    for (int i = 0; i < count; ++i) {
      prefetch(ahead, i * lanes);
      const Vector value = load(row + (i + 1 < count ? offset + i * lanes : last_offset));
      for (int h = 0; h < heads; ++h) {
        sums[h * count + i] += value * state.scores[head + h][k];
      }
    }
  }
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < count; ++i) {
      float* values = state.block_values[head + h] + offset + i * lanes;
      store(values, load(values) + sums[h * count + i]);
    }
  }
}

template <int heads, int most, typename Element>
inline void value_tile_of(int count, const RowVectors& vectors, const Block<Element>& block, int begin, int end,
                          int head, int first, TaskState& state) {
  if (count == most) {
    value_tile<heads, most>(vectors, block, begin, end, head, first, state);
  } else if constexpr (most > 1) {
    value_tile_of<heads, most - 1>(count, vectors, block, begin, end, head, first, state);
  }
}

template <int heads, typename Element>
inline void add_values(const RowVectors& vectors, const Block<Element>& block, int begin, int end, int head,
                       int end_head, TaskState& state) {
  constexpr int most = tile_sums / heads;
  const int tiles = (vectors.count + most - 1) / most;
  const int count = (vectors.count + tiles - 1) / tiles; // of about the same width, since a narrow one waits for itself
  for (; head + heads <= end_head; head += heads) {
    for (int first = 0; first < vectors.count; first += count) {
      const int rest = vectors.count - first;
      value_tile_of<heads, most>(count < rest ? count : rest, vectors, block, begin, end, head, first, state);
    }
  }
  if constexpr (heads > 1) {
    add_values<heads / 2>(vectors, block, begin, end, head, end_head, state);
  }
}

template <typename Element>
inline void attend_block(const RowVectors& vectors, Block<Element>& block, int first_head, int end_head,
                         float value_scale, TaskState& state) {
  const int count = block.count;
  if (count == 0) {
    return;
  }
  for (int k = count; k % tile_sums != 0; ++k) {
    block.key_rows[k] = block.key_rows[count - 1];
  }
  for (int k = 0; k < count; k += tile_sums) {
    dot_rows<4>(vectors, block, k, first_head, end_head, state);
  }
  for (int h = first_head; h < end_head; ++h) {
    weigh_scores(block, h, value_scale, state);
    for (int i = 0; i < vectors.count; ++i) {
      float* rest = state.block_values[h] + i * lanes;
      store(rest, load(rest) * state.rescale[h]);
    }
  }
  for (int k = 0; k < count; k += chain_rows) {
    const int end = k + chain_rows < count ? k + chain_rows : count;
    add_values<4>(vectors, block, k, end, first_head, end_head, state);
  }
  for (int h = first_head; h < end_head; ++h) {
    for (int i = 0; i < vectors.count; ++i) {
      float* values = state.values[h] + i * lanes;
      float* chain = state.block_values[h] + i * lanes;
      const Vector sum = load(values) * state.rescale[h];
      const Vector total = sum + load(chain);
      const Vector rest = load(chain) - (total - sum);
      store(values, total);
      store(chain, rest - rest == 0 ? rest : Vector{}); // as in add_chain()
    }
  }
}

} // namespace
} // namespace single_query
