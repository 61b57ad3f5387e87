// A whole task of the host twins, and the merges: included by the one source of each instruction set.
#pragma once

#include "attend_cpu.h"

namespace single_query {
namespace {

template <typename Scalar>
constexpr float value_scale_of() {
  return std::is_same_v<Scalar, __half> ? float16_value_scale : wide_value_scale;
}

// Calls work(element) with an element of the type that `dtype` names.
template <typename Work>
inline void with_scalar(DataType dtype, const Work& work) {
  switch (dtype) {
  case DataType::float16:
    return work(__half{});
  case DataType::bfloat16:
    return work(__nv_bfloat16{});
  default: // float32; validate() has refused everything else
    return work(0.0f);
  }
}

// The keys of `range` that take part for a query head, and where their rows of kv_head lie. False if one of them lies
// in a page that does not exist. An excluded key's page is not asked for.
template <typename Scalar>
inline bool gather(const AttentionProblem& problem, const HostTask& task, std::int64_t kv_head, std::int64_t query_head,
                   KeyRange range, Block<Scalar>& block) {
  const Scalar* key_page = nullptr;
  const Scalar* value_page = nullptr;
  std::uint32_t page_begin = range.begin; // of the page at hand
  std::uint32_t page_end = range.begin;
  block.modified = problem.attn_mask != nullptr || problem.alibi_slopes != nullptr || problem.softcap != 0;
  int count = 0;
  for (std::uint32_t key = range.begin; key < range.end; ++key) {
    if (block.modified) {
      block.mask[count] = mask_value(problem, task.batch, query_head, key);
      if (block.mask[count] == negative_infinity) {
        continue;
      }
      block.distance[count] = static_cast<float>(static_cast<std::int64_t>(key) - (task.row_length - std::int64_t{1}));
    }
    if (key >= page_end) {
      const KeySlot at = key_slot(problem, task.batch, key);
      if (!page_exists(problem, at.page)) {
        return false;
      }
      page_begin = key - at.slot;
      page_end = page_begin + static_cast<std::uint32_t>(problem.page_size);
      key_page = static_cast<const Scalar*>(problem.key) + at.page * problem.key_stride_page +
                 kv_head * problem.key_stride_head;
      value_page = static_cast<const Scalar*>(problem.value) + at.page * problem.value_stride_page +
                   kv_head * problem.value_stride_head;
    }
    block.key_rows[count] = key_page + (key - page_begin) * problem.key_stride_slot;
    block.value_rows[count] = value_page + (key - page_begin) * problem.value_stride_slot;
    ++count;
  }
  block.count = count;
  return true;
}

// Rows shorter than a vector, padded with zeros to one: the same block as a block of floats.
struct PackedRows {
  float keys[block_size][lanes];
  float values[block_size][lanes];
};

template <typename Scalar>
inline void pack(const Block<Scalar>& block, int head_dim, PackedRows& rows, Block<float>& packed) {
  packed.count = block.count;
  packed.modified = block.modified;
  std::memcpy(packed.distance, block.distance, sizeof(block.distance));
  std::memcpy(packed.mask, block.mask, sizeof(block.mask));
  for (int k = 0; k < block.count; ++k) {
    store(rows.keys[k], Vector{});
    store(rows.values[k], Vector{});
    widen(block.key_rows[k], head_dim, rows.keys[k]);
    widen(block.value_rows[k], head_dim, rows.values[k]);
    packed.key_rows[k] = rows.keys[k];
    packed.value_rows[k] = rows.values[k];
  }
}

// The softmax state of one query head, of any number of values.
struct RowState {
  float max_score = negative_infinity;
  float sum_exp = 0;
  alignas(64) float values[padded_head_dim]; // times the value scale
};

// States of disjoint sets of keys, merged in order: `part(p, first, count, state)` gives max_score, sum_exp and
// elements first .. first + count - 1 of the values of part p.
template <typename Part>
inline void merge_states(std::int64_t parts, int head_dim, const Part& part, RowState& merged) {
  constexpr int chunk = 64;
  for (int first = 0; first < head_dim; first += chunk) {
    const int count = head_dim - first < chunk ? head_dim - first : chunk;
    SoftmaxState<chunk> state, chain;
    for (std::int64_t p = 0; p < parts; ++p) {
      SoftmaxState<chunk> other;
      part(p, first, count, other);
      chain.merge(other);
      if (p % chain_length == chain_length - 1 || p + 1 == parts) {
        state.merge_chain(chain);
      }
    }
    std::memcpy(merged.values + first, state.values, sizeof(state.values));
    merged.max_score = state.max_score;
    merged.sum_exp = state.sum_exp;
  }
}

// output[d] and lse of a row. What happens to a value on the way to the output is a factor: that of a 1.
template <typename Scalar>
inline void finish_row(float max_score, float sum_exp, float* values, int head_dim, const float* sink, Scalar* output,
                       float* lse) {
  SoftmaxState<1> one;
  one.max_score = max_score;
  one.sum_exp = sum_exp;
  one.values[0] = 1;
  if (sink != nullptr) {
    one.merge_sink(*sink);
  }
  const float factor = one.output(0, value_scale_of<Scalar>());
  // As SoftmaxState::output() has it, a mean of finite values does not overflow by rounding.
  const Vector largest = Vector{} + std::numeric_limits<float>::max();
  for (int d = 0; d < head_dim; d += lanes) {
    const Vector value = load(values + d);
    Vector mean = value * factor;
    mean = (mean > largest) & (value <= largest) ? largest : mean;
    mean = (mean < -largest) & (value >= -largest) ? -largest : mean;
    store(values + d, sum_exp == 0 ? Vector{} : mean);
  }
  narrow(values, head_dim, output);
  if (lse != nullptr) {
    *lse = one.log_sum_exp();
  }
}

template <typename Scalar>
inline void finish_row(const AttentionProblem& problem, std::int64_t batch, std::int64_t query_head, float max_score,
                       float sum_exp, float* values) {
  finish_row(max_score, sum_exp, values, static_cast<int>(problem.head_dim),
             problem.sinks == nullptr ? nullptr : problem.sinks + query_head * problem.sinks_stride,
             static_cast<Scalar*>(problem.output) + batch * problem.output_stride_batch +
                 query_head * problem.output_stride_head,
             problem.lse == nullptr
                 ? nullptr
                 : problem.lse + batch * problem.lse_stride_batch + query_head * problem.lse_stride_head);
}

template <typename Scalar>
inline void start_task(const AttentionProblem& problem, const HostTask& task, const RowVectors& vectors,
                       TaskState& state) {
  const int head_dim = static_cast<int>(problem.head_dim);
  const int whole_vectors = (vectors.count - 1) * lanes;
  for (int h = 0; h < task.kv_heads * task.query_heads; ++h) {
    const std::int64_t query_head = task.first_query_head + h;
    const Scalar* query = static_cast<const Scalar*>(problem.query) + task.batch * problem.query_stride_batch +
                          query_head * problem.query_stride_head;
    widen(query, whole_vectors, state.query[h]);
    float last[lanes] = {};
    widen(query + vectors.last_offset, head_dim < lanes ? head_dim : lanes, last);
    store(state.query[h] + whole_vectors, vectors.fresh(load(last)));
    for (int d = 0; d <= whole_vectors; d += lanes) {
      store(state.values[h] + d, Vector{});
      store(state.block_values[h] + d, Vector{});
    }
    state.max_score[h] = negative_infinity;
    state.sum_exp[h] = 0;
    state.sum_rest[h] = 0;
    state.modifiers[h] = {problem.scale, problem.softcap, alibi_slope(problem, task.batch, query_head)};
  }
}

// The keys of `range` for heads first .. end - 1 of the task, which read kv_head.
template <typename Scalar>
inline void attend_keys(const AttentionProblem& problem, const HostTask& task, const RowVectors& vectors,
                        std::int64_t kv_head, KeyRange range, int first, int end, TaskState& state) {
  const int head_dim = static_cast<int>(problem.head_dim);
  Block<Scalar> block;
  if (!gather(problem, task, kv_head, task.first_query_head + first, range, block)) {
    for (int h = first; h < end; ++h) {
      state.sum_exp[h] = std::numeric_limits<float>::quiet_NaN();
    }
  } else if (head_dim < lanes) {
    PackedRows rows;
    Block<float> packed;
    pack(block, head_dim, rows, packed);
    attend_block(vectors, packed, first, end, value_scale_of<Scalar>(), state);
  } else {
    attend_block(vectors, block, first, end, value_scale_of<Scalar>(), state);
  }
}

template <typename Scalar>
void attend_task(const AttentionProblem& problem, const HostTask& task) {
  const int head_dim = static_cast<int>(problem.head_dim);
  const int heads = task.kv_heads * task.query_heads;
  const RowVectors vectors(head_dim < lanes ? lanes : head_dim);
  TaskState state;
  start_task<Scalar>(problem, task, vectors, state);

  // Heads with masks of their own take a block one by one: what one excludes another may need.
  const bool together = problem.attn_mask == nullptr || problem.mask_stride_head == 0;
  const int heads_at_once = together ? task.query_heads : 1;
  for (std::uint32_t begin = task.keys.begin; begin < task.keys.end; begin += block_keys) {
    const std::uint32_t rest = task.keys.end - begin;
    const KeyRange range{begin, begin + (rest < block_keys ? rest : block_keys)};
    for (int h = 0; h < heads; h += heads_at_once) {
      attend_keys<Scalar>(problem, task, vectors, task.kv_head + h / task.query_heads, range, h, h + heads_at_once,
                          state);
    }
  }

  for (int h = 0; h < heads; ++h) {
    float* values = state.values[h]; // from here on without repeated lanes
    store(values + vectors.last_offset, load(values + (vectors.count - 1) * lanes));
    if (task.partial != nullptr) {
      float* partial = task.partial + h * partial_floats(head_dim);
      partial[0] = state.max_score[h];
      partial[1] = state.sum_exp[h];
      std::memcpy(partial + 2, values, static_cast<std::size_t>(head_dim) * sizeof(float));
    } else {
      finish_row<Scalar>(problem, task.batch, task.first_query_head + h, state.max_score[h], state.sum_exp[h], values);
    }
  }
}

void attend(const AttentionProblem& problem, const HostTask& task) {
  with_scalar(problem.dtype, [&](auto scalar) { attend_task<decltype(scalar)>(problem, task); });
}

void merge_partials(const AttentionProblem& problem, const HostPartials& partials) {
  RowState merged;
  merge_states(
      partials.splits, static_cast<int>(problem.head_dim),
      [&](std::int64_t split, int first, int count, auto& part) {
        const float* partial = partials.first + split * partials.stride;
        part.max_score = partial[0];
        part.sum_exp = partial[1];
        widen(partial + 2 + first, count, part.values);
      },
      merged);
  with_scalar(problem.dtype, [&](auto scalar) {
    finish_row<decltype(scalar)>(problem, partials.batch, partials.query_head, merged.max_score, merged.sum_exp,
                                 merged.values);
  });
}

void merge_parts(const MergeProblem& problem, std::int64_t batch, std::int64_t head) {
  with_scalar(problem.dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const int head_dim = static_cast<int>(problem.head_dim);
    RowState merged;
    merge_states(
        problem.parts, head_dim,
        [&](std::int64_t p, int first, int count, auto& part) {
          part.max_score =
              problem
                  .lse[p * problem.lse_stride_part + batch * problem.lse_stride_batch + head * problem.lse_stride_head];
          if (part.max_score == negative_infinity) {
            return; // no key: whatever the output holds
          }
          part.sum_exp = 1;
          const Scalar* outputs = static_cast<const Scalar*>(problem.outputs) + p * problem.outputs_stride_part +
                                  batch * problem.outputs_stride_batch + head * problem.outputs_stride_head;
          widen(outputs + first, count, part.values);
          for (int i = 0; i < count; ++i) {
            part.values[i] *= value_scale_of<Scalar>();
          }
        },
        merged);
    finish_row(
        merged.max_score, merged.sum_exp, merged.values, head_dim, nullptr,
        static_cast<Scalar*>(problem.output) + batch * problem.output_stride_batch + head * problem.output_stride_head,
        problem.output_lse == nullptr
            ? nullptr
            : problem.output_lse + batch * problem.output_lse_stride_batch + head * problem.output_lse_stride_head);
  });
}

} // namespace
} // namespace single_query
