#include "merge_case.h"

#include "element.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace single_query::test {

MergeData::MergeData(const MergeCase& merge_case) : case_(merge_case) {
  const MergeCase& c = case_;
  layout_.dtype = c.dtype;
  layout_.parts = c.parts;
  layout_.batch = c.batch;
  layout_.heads = c.heads;
  layout_.head_dim = c.head_dim;
  const auto make = [&](Tensor tensor, const Layout& layout, const std::map<char, std::int64_t>& sizes,
                        std::int64_t row, int element_bytes) {
    if (layout.order.empty()) {
      return std::map<char, std::int64_t>();
    }
    const Plan result = plan(layout, sizes, row, false);
    buffers_[tensor] = GuardedBuffer(result.elements, element_bytes, true, Fill::nan, c.dtype == DataType::bfloat16);
    offsets_[tensor] = layout.offset;
    return result.strides;
  };
  const std::map<char, std::int64_t> in = {{'p', c.parts}, {'b', c.batch}, {'h', c.heads}};
  const std::map<char, std::int64_t> out = {{'b', c.batch}, {'h', c.heads}};
  const int element_bytes = format_of(c.dtype).bytes;
  std::map<char, std::int64_t> strides = make(outputs, c.outputs, in, c.head_dim, element_bytes);
  layout_.outputs_stride_part = strides['p'];
  layout_.outputs_stride_batch = strides['b'];
  layout_.outputs_stride_head = strides['h'];
  strides = make(lse_in, c.lse, in, 1, 4);
  layout_.lse_stride_part = strides['p'];
  layout_.lse_stride_batch = strides['b'];
  layout_.lse_stride_head = strides['h'];
  strides = make(output_out, c.output, out, c.head_dim, element_bytes);
  layout_.output_stride_batch = strides['b'];
  layout_.output_stride_head = strides['h'];
  strides = make(lse_out, c.output_lse, out, 1, 4);
  layout_.output_lse_stride_batch = strides['b'];
  layout_.output_lse_stride_head = strides['h'];

  Random random(c.seed);
  for (std::int64_t part = 0; part < c.parts; ++part) {
    for (std::int64_t row = 0; row < c.batch * c.heads; ++row) {
      set_lse(part, row, static_cast<float>(random.uniform(-c.lse_spread, c.lse_spread)));
      for (std::int64_t d = 0; d < c.head_dim; ++d) {
        set_output(part, row, d, random.uniform(-1, 1));
      }
    }
  }
}

// Counted from the end of the first guard.
std::int64_t MergeData::element(Tensor tensor, std::int64_t part, std::int64_t row) const {
  const std::int64_t b = row / case_.heads;
  const std::int64_t h = row % case_.heads;
  const MergeProblem& p = layout_;
  switch (tensor) {
  case outputs:
    return offsets_[tensor] + part * p.outputs_stride_part + b * p.outputs_stride_batch + h * p.outputs_stride_head;
  case lse_in:
    return offsets_[tensor] + part * p.lse_stride_part + b * p.lse_stride_batch + h * p.lse_stride_head;
  case output_out:
    return offsets_[tensor] + b * p.output_stride_batch + h * p.output_stride_head;
  default:
    return offsets_[tensor] + b * p.output_lse_stride_batch + h * p.output_lse_stride_head;
  }
}

void MergeData::set_lse(std::int64_t part, std::int64_t row, float value) {
  encode(DataType::float32, buffers_[lse_in].data(), element(lse_in, part, row), value);
}

void MergeData::set_output(std::int64_t part, std::int64_t row, std::int64_t d, double value) {
  encode(case_.dtype, buffers_[outputs].data(), element(outputs, part, row) + d, value);
}

double MergeData::lse(std::int64_t part, std::int64_t row) const {
  return decode(DataType::float32, buffers_[lse_in].data(), element(lse_in, part, row));
}

double MergeData::output(std::int64_t part, std::int64_t row, std::int64_t d) const {
  return decode(case_.dtype, buffers_[outputs].data(), element(outputs, part, row) + d);
}

Reference MergeData::reference() const {
  AttentionProblem shape;
  shape.batch = case_.batch;
  shape.query_heads = case_.heads;
  shape.head_dim = case_.head_dim;
  Reference result = empty_reference(shape);
  for (std::int64_t row = 0; row < result.rows; ++row) {
    const auto at = static_cast<std::size_t>(row);
    double max_lse = -INFINITY;
    double magnitude = 0;
    for (std::int64_t part = 0; part < case_.parts; ++part) {
      max_lse = std::fmax(max_lse, lse(part, row));
      magnitude = std::isfinite(lse(part, row)) ? std::fmax(magnitude, std::fabs(lse(part, row))) : magnitude;
    }
    double sum = 0;
    std::vector<double> outputs_sum(static_cast<std::size_t>(case_.head_dim));
    std::vector<double> magnitudes(outputs_sum.size());
    for (std::int64_t part = 0; part < case_.parts; ++part) {
      if (lse(part, row) == -INFINITY) {
        continue;
      }
      const double weight = std::exp(lse(part, row) - max_lse);
      sum += weight;
      for (std::size_t d = 0; d < outputs_sum.size(); ++d) {
        const double value = output(part, row, static_cast<std::int64_t>(d));
        outputs_sum[d] += weight * value;
        magnitudes[d] += weight * std::fabs(value);
        result.value_total[at * outputs_sum.size() + d] += std::fabs(value);
      }
    }
    for (std::size_t d = 0; sum != 0 && d < outputs_sum.size(); ++d) {
      result.output[at * outputs_sum.size() + d] = outputs_sum[d] / sum;
      result.value_magnitude[at * outputs_sum.size() + d] = magnitudes[d] / sum;
    }
    result.lse[at] = sum == 0 ? -INFINITY : max_lse + std::log(sum);
    result.score_magnitude[at] = magnitude;
    result.keys[at] = case_.parts;
  }
  return result;
}

Result MergeData::run(Device device, const ParallelFor& parallel_for) const {
  std::array<Memory, tensors> memory;
  std::array<std::byte*, tensors> first;
  for (std::size_t i = 0; i < tensors; ++i) {
    memory[i] = Memory(device, buffers_[i].bytes().size());
    memory[i].upload(buffers_[i].bytes().data(), buffers_[i].bytes().size());
    first[i] = memory[i].data() + buffers_[i].guard_bytes() + offsets_[i] * buffers_[i].element_bytes();
  }
  MergeProblem problem = layout_;
  problem.outputs = first[outputs];
  problem.lse = reinterpret_cast<const float*>(first[lse_in]);
  problem.output = first[output_out];
  const bool lse_wanted = !case_.output_lse.order.empty();
  problem.output_lse = lse_wanted ? reinterpret_cast<float*>(first[lse_out]) : nullptr;
  if (device == Device::cpu) {
    merge_on_host(problem, parallel_for);
  } else {
    const Stream stream;
    merge(problem, stream.get());
    stream.wait();
  }

  Result result;
  result.dtype = case_.dtype;
  result.rows = case_.batch * case_.heads;
  result.head_dim = case_.head_dim;
  const auto row_bytes = static_cast<std::size_t>(case_.head_dim * format_of(case_.dtype).bytes);
  result.output.resize(static_cast<std::size_t>(result.rows) * row_bytes);
  result.lse.resize(lse_wanted ? static_cast<std::size_t>(result.rows) : 0);
  for (std::size_t i = 0; i < tensors; ++i) {
    GuardedBuffer allowed = buffers_[i];
    std::vector<std::byte> now(allowed.bytes().size());
    memory[i].download(now.data(), now.size());
    const bool written = i == output_out || (i == lse_out && lse_wanted);
    for (std::int64_t row = 0; written && row < result.rows; ++row) {
      const auto at = static_cast<std::size_t>(element(static_cast<Tensor>(i), 0, row) * allowed.element_bytes());
      const std::size_t bytes = i == output_out ? row_bytes : sizeof(float);
      std::byte* to = i == output_out ? result.output.data() + static_cast<std::size_t>(row) * row_bytes
                                      : reinterpret_cast<std::byte*>(&result.lse[static_cast<std::size_t>(row)]);
      std::memcpy(to, now.data() + allowed.guard_bytes() + at, bytes);
      std::memcpy(allowed.data() + at, to, bytes);
    }
    if (const std::string where = first_difference(allowed, now); !where.empty()) {
      throw std::runtime_error("merge wrote where nothing may be written: tensor " + std::to_string(i) + ", " + where);
    }
  }
  return result;
}

} // namespace single_query::test
