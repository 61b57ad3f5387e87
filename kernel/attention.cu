// Validate, plan, dispatch, launch. The lists of data types and head dims are in select_kernel and in single_step.cu.
#include "device.h"
#include "simt_attention.cuh"
#include "single_step.cuh"
#include "tensor_core_attention.cuh"
#include "validate.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace single_query {
namespace {

// One compiled kernel and what the host has to know of it.
struct Kernel {
  const void* functions[paths]; // by Path; none for Path::spread where that cannot be taken
  BodyTraits body;
  int tile_heads;
  int head_shift; // of the partial states
  int (*shared_bytes)(const SplitPlan& plan);
  std::atomic<std::uint64_t>* prepared; // by Path, a bit per device
};

// Devices that know how much shared memory a kernel may use.
template <class Shape>
std::atomic<std::uint64_t> prepared_devices[paths];

// Whether Path::spread is one for the problem, if 8 warps share a piece of it. Not with a split size, or a row's bits
// would depend on whether it is paged.
bool can_spread(const KernelArguments& args, int padded_dim) {
  const AttentionProblem& problem = args.problem;
  return std::min(args.key_copy_bytes, args.value_copy_bytes) < 16 && !args.modified && problem.page_table == nullptr &&
         problem.split_size == 0 && problem.head_dim + most_early <= padded_dim;
}

template <class Shape>
Kernel tensor_core_kernel(const KernelArguments& args, const Device& device) {
  constexpr bool wide = Shape::padded_dim == 256;
  // Of a warp, beside its ring: its staging in a walk, or its tile's part of a cluster's mailbox.
  constexpr int mailbox_bytes = ClusterMailbox::bytes(Shape::tile_heads << Shape::head_shift, 1);
  const int merge_bytes =
      device.traits.has_clusters ? std::max(Shape::staging_bytes, mailbox_bytes) : Shape::staging_bytes;
  const int room = (device.shared_bytes - 1024) / (Shape::Ring::warp_bytes + merge_bytes);
  const int most_warps =
      static_cast<int>(power_of_two_at_most(static_cast<std::uint32_t>(std::clamp(room, 1, Shape::most_warps))));
  // Warps that share their keys, so that the cache is read once. Keys that a mask excludes for some heads only are
  // taken out of a tile of values, which is then one warp's own.
  const int tiles = (args.group + Shape::tile_heads - 1) / Shape::tile_heads;
  int team = !Shape::teams || args.problem.attn_mask != nullptr || tiles == 1
                 ? 1
                 : std::min(most_warps, 2 << log2_floor(static_cast<std::uint32_t>(tiles - 1)));
  // Of few rows every multiprocessor gets a small share, and merging all of them takes longer than reading the keys
  // from the L2 cache again. With a split size always the same, or a row's bits would depend on its batch.
  const std::int64_t kv_rows = args.problem.batch * args.problem.kv_heads;
  while (args.problem.split_size == 0 && team > 2 &&
         16 * kv_rows * ((tiles + team - 1) / team) <= device.traits.multiprocessors) {
    team /= 2;
  }
  // Shorter rows, more heads and copies that have to be mended take a warp about as long as 8 heads of full rows.
  const bool fast = args.problem.head_dim == Shape::padded_dim && Shape::head_blocks == 1 && team == 1 &&
                    std::min(args.key_copy_bytes, args.value_copy_bytes) == 16;
  const bool spread = Shape::head_blocks == 1 && team == 1 && can_spread(args, Shape::padded_dim);
  const int small_warps = team > 1 || spread ? most_warps : std::min(most_warps, 4);
  // The large shapes have more to do than to fetch instructions, and take long to compile.
  constexpr Path row = Shape::teams ? Path::general : Path::row;
  constexpr Path walk = Shape::teams ? Path::general : Path::walk;
  constexpr Path pages = Shape::teams ? Path::general : Path::pages;
  constexpr Path pages_walk = Shape::teams ? Path::general : Path::pages_walk;
  constexpr Path any_pages = Shape::teams ? Path::general : Path::any_pages;
  constexpr Path spread_path = Shape::head_blocks == 1 ? Path::spread : Path::general;
  using TeamShape = TensorCoreShape<Shape::padded_dim, Shape::head_blocks, Shape::teams ? 2 : 1>;
  return {{team > 1 ? reinterpret_cast<const void*>(&tensor_core_attention<TeamShape, Path::plain>)
                    : reinterpret_cast<const void*>(&tensor_core_attention<Shape, Path::plain>),
           reinterpret_cast<const void*>(&tensor_core_attention<Shape, row>),
           reinterpret_cast<const void*>(&tensor_core_attention<Shape, walk>),
           reinterpret_cast<const void*>(&tensor_core_attention<Shape, pages>),
           reinterpret_cast<const void*>(&tensor_core_attention<Shape, pages_walk>),
           reinterpret_cast<const void*>(&tensor_core_attention<Shape, any_pages>),
           spread ? reinterpret_cast<const void*>(&tensor_core_attention<Shape, spread_path>) : nullptr,
           reinterpret_cast<const void*>(&tensor_core_attention<Shape, Path::general>)},
          {step_keys, team, small_warps, wide || team > 1 || room < 2 * small_warps ? 1 : 2, small_warps, most_warps,
           16, output_chain_steps, true, fast ? 1 : 2},
          Shape::tile_heads,
          Shape::head_shift,
          [](const SplitPlan& plan) { return Shape::shared_bytes(plan); },
          team > 1 ? prepared_devices<TeamShape> : prepared_devices<Shape>};
}

template <class Shape>
Kernel simt_kernel(bool plain) {
  const void* const row = reinterpret_cast<const void*>(&simt_attention<Shape, Path::row>);
  const void* const general = reinterpret_cast<const void*>(&simt_attention<Shape, Path::general>);
  return {{row, row, reinterpret_cast<const void*>(&simt_attention<Shape, Path::walk>), general, general, general,
           nullptr, general},
          {Shape::step_keys, 1, 8, plain ? Shape::plain_blocks : 1, 4, 8, Shape::step_keys, 0x7fffffff, false,
           plain && Shape::tile_heads > 1 ? 2 * Shape::plain_blocks : 2},
          Shape::tile_heads,
          Shape::head_shift,
          [](const SplitPlan& plan) { return Shape::shared_bytes(plan); },
          prepared_devices<Shape>};
}

// float16 and bfloat16 on the tensor cores, a group's query heads by eights; float32 on the others, by fours or eights.
// little: no modifiers, rows that are aligned to 16 bytes.
Kernel select_kernel(const KernelArguments& args, bool little, const Device& device) {
  const AttentionProblem& problem = args.problem;
  const bool plain = little && problem.page_table == nullptr;
  const int group = args.group;
  const std::int64_t head_dim = problem.head_dim;
  if (problem.dtype == DataType::float32) {
    if (head_dim <= 32) {
      return group == 1 ? simt_kernel<SimtShape<8, 1, 1>>(plain) : simt_kernel<SimtShape<8, 1, 8>>(plain);
    }
    if (head_dim <= 64) {
      return group == 1   ? simt_kernel<SimtShape<8, 2, 1>>(plain)
             : group <= 4 ? simt_kernel<SimtShape<16, 1, 4>>(plain)
                          : simt_kernel<SimtShape<16, 1, 8>>(plain);
    }
    if (head_dim <= 128) {
      return group == 1   ? simt_kernel<SimtShape<8, 4, 1>>(plain)
             : group <= 4 ? simt_kernel<SimtShape<32, 1, 4>>(plain)
                          : simt_kernel<SimtShape<32, 1, 8>>(plain);
    }
    return group == 1   ? simt_kernel<SimtShape<16, 4, 1>>(plain)
           : group <= 4 ? simt_kernel<SimtShape<32, 2, 4>>(plain)
                        : simt_kernel<SimtShape<32, 2, 8>>(plain);
  }
  if (head_dim <= 64) {
    return group <= 8 ? tensor_core_kernel<TensorCoreShape<64, 1>>(args, device)
                      : tensor_core_kernel<TensorCoreShape<64, 2>>(args, device);
  }
  if (head_dim <= 128) {
    return group <= 8 ? tensor_core_kernel<TensorCoreShape<128, 1>>(args, device)
                      : tensor_core_kernel<TensorCoreShape<128, 2>>(args, device);
  }
  return tensor_core_kernel<TensorCoreShape<256, 1>>(args, device);
}

// The problem with strides of 0 on axes of fewer than two elements: whatever the caller's are, they lead nowhere.
AttentionProblem without_unused_strides(const AttentionProblem& given) {
  AttentionProblem problem = given;
  const std::pair<std::int64_t, std::int64_t*> axes[] = {
      {problem.batch, &problem.query_stride_batch},   {problem.query_heads, &problem.query_stride_head},
      {problem.batch, &problem.output_stride_batch},  {problem.query_heads, &problem.output_stride_head},
      {problem.pages, &problem.key_stride_page},      {problem.kv_heads, &problem.key_stride_head},
      {problem.page_size, &problem.key_stride_slot},  {problem.pages, &problem.value_stride_page},
      {problem.kv_heads, &problem.value_stride_head}, {problem.page_size, &problem.value_stride_slot}};
  for (const auto& [size, stride] : axes) {
    *stride = size > 1 ? *stride : 0;
  }
  return problem;
}

// The most of 16, 8, 4 bytes or one element that all rows of a tensor begin and end at multiples of.
int copy_bytes(const AttentionProblem& problem, const void* data, std::initializer_list<std::int64_t> strides) {
  const std::int64_t element = bytes_of(problem.dtype);
  std::uint64_t bits =
      16 | reinterpret_cast<std::uint64_t>(data) | static_cast<std::uint64_t>(problem.head_dim * element);
  for (const std::int64_t stride : strides) {
    bits |= static_cast<std::uint64_t>(stride * element);
  }
  return static_cast<int>(bits & (~bits + 1)); // the lowest bit
}

// Of a cache: the row at the highest address.
const void* last_row(const AttentionProblem& problem, const void* data, std::int64_t stride_page,
                     std::int64_t stride_head, std::int64_t stride_slot) {
  const std::int64_t element = bytes_of(problem.dtype);
  return static_cast<const char*>(data) +
         element * ((problem.pages - 1) * stride_page + (problem.kv_heads - 1) * stride_head +
                    (problem.page_size - 1) * stride_slot);
}

constexpr std::uint64_t partial_element_bytes = sizeof(float4) + sizeof(float2);

struct Plan {
  Kernel kernel;
  Path path;
  KernelArguments arguments;
  std::uint64_t partial_elements; // of the workspace
  SingleStepKernel single_step;   // instead of `kernel`
};

// Elements of all partial states, see Pieces::cut().
std::uint64_t partial_elements(const KernelArguments& args, std::int64_t rows) {
  const SplitPlan& split = args.plan;
  const bool by_share = split.walk && !split.pieces_are_units;
  const std::uint64_t owners = by_share ? split.blocks : static_cast<std::uint64_t>(rows);
  const std::uint64_t slots = by_share     ? 2
                              : split.walk ? split.splits_per_row
                                           : static_cast<std::uint64_t>(split.clusters);
  if (slots == 1) {
    return 0;
  }
  std::uint64_t elements = static_cast<std::uint64_t>(args.row_heads) << args.head_shift;
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(elements, owners, &elements) || __builtin_mul_overflow(elements, slots, &elements) ||
      __builtin_mul_overflow(elements, partial_element_bytes, &bytes) || bytes >> 63 != 0) {
    refuse_splits(args.problem);
  }
  return elements;
}

Plan make_plan(const AttentionProblem& given, const Device& device) {
  Plan plan{};
  KernelArguments& args = plan.arguments;
  args.problem = without_unused_strides(given);
  const AttentionProblem& problem = args.problem;
  args.group = static_cast<int>(problem.query_heads / problem.kv_heads);
  args.query_copy_bytes = copy_bytes(problem, problem.query, {problem.query_stride_batch, problem.query_stride_head});
  args.key_copy_bytes =
      copy_bytes(problem, problem.key, {problem.key_stride_page, problem.key_stride_head, problem.key_stride_slot});
  args.value_copy_bytes = copy_bytes(problem, problem.value,
                                     {problem.value_stride_page, problem.value_stride_head, problem.value_stride_slot});
  args.last_key_row =
      last_row(problem, problem.key, problem.key_stride_page, problem.key_stride_head, problem.key_stride_slot);
  args.last_value_row =
      last_row(problem, problem.value, problem.value_stride_page, problem.value_stride_head, problem.value_stride_slot);
  args.output_vectors =
      copy_bytes(problem, problem.output, {problem.output_stride_batch, problem.output_stride_head}) == 16;
  args.modified = problem.softcap != 0 || problem.alibi_slopes != nullptr || problem.attn_mask != nullptr;
  const bool paged = problem.page_table != nullptr;
  const bool little = !args.modified &&
                      std::min({args.query_copy_bytes, args.key_copy_bytes, args.value_copy_bytes}) == 16;
  plan.kernel = select_kernel(args, little, device);
  args.row_heads = std::min(plan.kernel.tile_heads * plan.kernel.body.team, args.group);
  args.head_shift = plan.kernel.head_shift;
  args.rows_per_kv_head = (args.group + args.row_heads - 1) / args.row_heads;
  args.rows_per_batch = static_cast<std::uint32_t>(problem.kv_heads * args.rows_per_kv_head);
  const std::int64_t rows = problem.batch * args.rows_per_batch;
  args.plan = make_split_plan(problem, rows, plan.kernel.body, device.traits);
  const std::uint32_t length = static_cast<std::uint32_t>(capacity(problem));
  const KeyRange keys = attended_keys(problem, length);
  args.uniform = {length, keys, args.plan.walk ? units_of(keys.end - keys.begin, args.plan.unit_keys) : 1};
  args.uniform_shares = shares_of(args.plan, keys.end - keys.begin);
  const std::int64_t step = args.plan.cluster_size * args.plan.warps * plan.kernel.body.keys_per_warp;
  args.key_step = step * problem.key_stride_slot;
  args.value_step = step * problem.value_stride_slot;
  const SplitPlan& split = args.plan;
  const bool spread = plan.kernel.functions[static_cast<int>(Path::spread)] != nullptr &&
                      split.cluster_size * split.warps % 8 == 0; // that share a piece
  plan.path = spread                        ? Path::spread
              : !little                     ? Path::general
              : paged && problem.page_size % step_keys != 0 ? Path::any_pages
              : paged && split.walk         ? Path::pages_walk
              : paged                       ? Path::pages
              : split.walk                  ? Path::walk
              : problem.lengths == nullptr  ? Path::plain
                                            : Path::row;
  plan.single_step = select_single_step(args, device.traits);
  if (plan.single_step.function != nullptr) {
    return plan;
  }
  plan.partial_elements = partial_elements(args, rows);
  return plan;
}

std::size_t workspace_bytes(const Plan& plan) {
  constexpr std::size_t counter_bytes = workspace_counters * sizeof(std::uint32_t);
  return plan.partial_elements == 0 ? 0 : counter_bytes + plan.partial_elements * partial_element_bytes;
}

bool is_empty(const AttentionProblem& problem) {
  return problem.batch == 0 || problem.query_heads == 0;
}

// More shared memory than every device grants has to be asked for, once per kernel and device.
void prepare(const Kernel& kernel, Path path, const Device& device, int shared_bytes) {
  const void* const function = kernel.functions[static_cast<int>(path)];
  std::atomic<std::uint64_t>& prepared = kernel.prepared[static_cast<int>(path)];
  constexpr int always_granted = 48 * 1024 - 1024; // less what a kernel has statically
  const std::uint64_t bit = device.index < 64 ? 1ull << device.index : 0;
  if (shared_bytes <= always_granted || (prepared.load(std::memory_order_relaxed) & bit) != 0) {
    return;
  }
  allow_shared_memory(function, device);
  prepared.fetch_or(bit, std::memory_order_relaxed);
}

} // namespace

AttentionProblem contiguous_problem(DataType dtype, std::int64_t batch, std::int64_t query_heads, std::int64_t kv_heads,
                                    std::int64_t keys, std::int64_t head_dim) {
  AttentionProblem problem;
  problem.dtype = dtype;
  problem.batch = problem.pages = batch;
  problem.query_heads = query_heads;
  problem.kv_heads = kv_heads;
  problem.page_size = keys;
  problem.head_dim = head_dim;
  problem.query_stride_batch = problem.output_stride_batch = query_heads * head_dim;
  problem.query_stride_head = problem.output_stride_head = head_dim;
  problem.lse_stride_batch = query_heads;
  problem.lse_stride_head = 1;
  problem.key_stride_page = problem.value_stride_page = kv_heads * keys * head_dim;
  problem.key_stride_head = problem.value_stride_head = keys * head_dim;
  problem.key_stride_slot = problem.value_stride_slot = head_dim;
  problem.scale = head_dim > 0 ? 1.0f / sqrtf(static_cast<float>(head_dim)) : 1.0f;
  return problem;
}

std::size_t attention_workspace_bytes(const AttentionProblem& problem) {
  validate(problem);
  return is_empty(problem) ? 0 : workspace_bytes(make_plan(problem, current_device()));
}

void attention(const AttentionProblem& problem, void* workspace, std::size_t bytes, cudaStream_t stream) {
  validate(problem);
  if (is_empty(problem)) {
    return;
  }
  const Device device = current_device();
  Plan plan = make_plan(problem, device);
  validate_workspace(workspace, bytes, workspace_bytes(plan), 256);
  if (plan.single_step.function != nullptr) {
    launch_single_step(plan.single_step, plan.arguments, stream);
    return;
  }
  KernelArguments& args = plan.arguments;
  args.counters = static_cast<std::uint32_t*>(workspace);
  args.partial_values = reinterpret_cast<float4*>(args.counters + workspace_counters);
  args.partial_states = reinterpret_cast<float2*>(args.partial_values + plan.partial_elements);
  const SplitPlan& split = args.plan;
  const int shared_bytes = plan.kernel.shared_bytes(split);
  prepare(plan.kernel, plan.path, device, shared_bytes);
  const dim3 grid = split.walk ? dim3(split.blocks)
                               : dim3(static_cast<unsigned>(split.cluster_size * split.clusters), args.rows_per_batch,
                                      static_cast<unsigned>(problem.batch));
  launch({plan.kernel.functions[static_cast<int>(plan.path)], grid, static_cast<unsigned>(split.warps * 32),
          static_cast<unsigned>(shared_bytes), split.cluster_size, stream},
         &args);
}

} // namespace single_query
