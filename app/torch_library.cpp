// The operators single_query::attention, attention.out, attention_with_lse and merge: their schemas, what they do with
// fake tensors, and the C++ functions, which go straight to the kernels where nobody else wants to know of the call.
#include "single_query/torch.h"
#include "torch_arguments.h"
#include "torch_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace single_query {
namespace {

// An operator's arguments, in the order of its schema, to a function that takes AttentionOptions.
template <auto function>
auto from_schema(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const std::optional<at::Tensor>& attn_mask, std::optional<double> scale,
                 const std::optional<at::Tensor>& lengths, const std::optional<at::Tensor>& page_table,
                 std::optional<std::int64_t> window, double softcap, const std::optional<at::Tensor>& alibi_slopes,
                 const std::optional<at::Tensor>& sinks, std::optional<std::int64_t> split_size) {
  return function(query, key, value,
                  {attn_mask, scale, lengths, page_table, window, softcap, alibi_slopes, sinks, split_size});
}

template <auto function>
at::Tensor& from_out_schema(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const std::optional<at::Tensor>& attn_mask, std::optional<double> scale,
                            const std::optional<at::Tensor>& lengths, const std::optional<at::Tensor>& page_table,
                            std::optional<std::int64_t> window, double softcap,
                            const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& sinks,
                            std::optional<std::int64_t> split_size, at::Tensor& out) {
  return function(query, key, value,
                  {attn_mask, scale, lengths, page_table, window, softcap, alibi_slopes, sinks, split_size}, out);
}

// And the other way: through the dispatcher. Finding an operator takes a lock, hence once per kind of call.
template <typename Schema, typename... Out>
decltype(auto) dispatch(const char* overload, const char* name, const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value, const AttentionOptions& options, Out&... out) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Schema>();
  return op.call(query, key, value, options.attn_mask, options.scale, options.lengths, options.page_table,
                 options.window, options.softcap, options.alibi_slopes, options.sinks, options.split_size, out...);
}

// Whether something holds for any of the tensors of a call.
template <typename Predicate, typename... Tensors>
bool any_tensor(const Predicate& predicate, const AttentionOptions& options, const Tensors&... tensors) {
  const auto given = [&](const std::optional<at::Tensor>& tensor) { return tensor && predicate(*tensor); };
  return (predicate(tensors) || ...) || given(options.attn_mask) || given(options.lengths) ||
         given(options.page_table) || given(options.alibi_slopes) || given(options.sinks);
}

// True where the dispatcher could do nothing but come to the kernel for CPU and CUDA: the tensors are plain ones, and
// no mode of this thread (fake tensors, functorch, tracing) listens.
template <typename... Tensors>
bool is_plain(const AttentionOptions& options, const Tensors&... tensors) {
  constexpr c10::DispatchKeySet plain =
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::BackendSelect}) |
      c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit}) |
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const auto is_special = [&](const at::Tensor& tensor) { return !plain.has_all(tensor.key_set()); };
  return plain.has_all(c10::impl::tls_local_dispatch_key_set().included_) &&
         !any_tensor(is_special, options, tensors...);
}

// Sizes that are symbols (torch.export) can be neither read nor compared without claiming something about them.
bool is_symbolic(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

at::Tensor empty_meta(c10::SymIntArrayRef sizes, at::ScalarType type) {
  return at::Tensor(at::detail::empty_symint_meta(sizes, type, std::nullopt, std::nullopt, std::nullopt, std::nullopt));
}

void check_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const AttentionOptions& options) {
  if (any_tensor(is_symbolic, options, query, key, value)) {
    check_attention_types(query, key, value, options);
  } else {
    attention_problem(query, key, value, options, Pointers::no);
  }
}

at::Tensor attention_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const AttentionOptions& options) {
  check_meta(query, key, value, options);
  return empty_meta(query.sym_sizes(), query.scalar_type());
}

at::Tensor& attention_out_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const AttentionOptions& options, at::Tensor& out) {
  if (any_tensor(is_symbolic, options, query, key, value, out)) {
    check_attention_types(query, key, value, options);
    check_out_type(out, query);
  } else {
    AttentionProblem problem = attention_problem(query, key, value, options, Pointers::no);
    set_output(problem, out, query, Pointers::no);
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse_meta(const at::Tensor& query, const at::Tensor& key,
                                                           const at::Tensor& value, const AttentionOptions& options) {
  check_meta(query, key, value, options);
  const c10::SymIntArrayRef sizes = query.sym_sizes();
  return {empty_meta(sizes, query.scalar_type()), empty_meta(sizes.slice(0, sizes.size() - 1), at::kFloat)};
}

std::tuple<at::Tensor, at::Tensor> merge_meta(const at::Tensor& outputs, const at::Tensor& lse) {
  if (is_symbolic(outputs) || is_symbolic(lse)) {
    check_merge_types(outputs, lse);
  } else {
    merge_problem(outputs, lse, Pointers::no);
  }
  return {empty_meta(outputs.sym_sizes().slice(1), outputs.scalar_type()),
          empty_meta(lse.sym_sizes().slice(1), at::kFloat)};
}

// torch.compile has no way of its own to rewrite an operator that returns what it writes to: compute, then replace.
at::Tensor& attention_out_functionalized(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const AttentionOptions& options, at::Tensor& out) {
  namespace functional = at::functionalization::impl;
  const auto unwrapped = [](const at::Tensor& tensor) {
    if (!functional::isFunctionalTensor(tensor)) {
      return tensor;
    }
    functional::sync(tensor);
    return functional::from_functional_tensor(tensor);
  };
  AttentionOptions inner = options;
  for (std::optional<at::Tensor>* tensor :
       {&inner.attn_mask, &inner.lengths, &inner.page_table, &inner.alibi_slopes, &inner.sinks}) {
    if (*tensor) {
      *tensor = unwrapped(**tensor);
    }
  }
  TORCH_CHECK(functional::isFunctionalTensor(out), "out is not part of the graph that is being traced: it must be");
  at::AutoDispatchSkipFunctionalize below;
  functional::replace_(out, attention(unwrapped(query), unwrapped(key), unwrapped(value), inner));
  functional::commit_update(out);
  functional::sync(out);
  return out;
}

} // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  if (is_plain(options, query, key, value)) {
    return attention_kernel(query, key, value, options);
  }
  return dispatch<decltype(from_schema<&attention_kernel>)>("", "single_query::attention", query, key, value, options);
}

at::Tensor& attention_out(at::Tensor& out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const AttentionOptions& options) {
  if (is_plain(options, query, key, value, out)) {
    return attention_out_kernel(query, key, value, options, out);
  }
  return dispatch<decltype(from_out_schema<&attention_out_kernel>)>("out", "single_query::attention", query, key, value,
                                                                    options, out);
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const AttentionOptions& options) {
  if (is_plain(options, query, key, value)) {
    return attention_with_lse_kernel(query, key, value, options);
  }
  return dispatch<decltype(from_schema<&attention_with_lse_kernel>)>("", "single_query::attention_with_lse", query, key,
                                                                     value, options);
}

std::tuple<at::Tensor, at::Tensor> merge(const at::Tensor& outputs, const at::Tensor& lse) {
  if (is_plain({}, outputs, lse)) {
    return merge_kernel(outputs, lse);
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("single_query::merge", "").typed<decltype(merge_kernel)>();
  return op.call(outputs, lse);
}

} // namespace single_query

TORCH_LIBRARY(single_query, library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const std::string arguments =
      "(Tensor query, Tensor key, Tensor value, *, Tensor? attn_mask=None, float? scale=None, Tensor? lengths=None, "
      "Tensor? page_table=None, int? window=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "int? split_size=None";
  library.def(("attention" + arguments + ") -> Tensor").c_str(), tags);
  library.def(("attention.out" + arguments + ", Tensor(a!) out) -> Tensor(a!)").c_str(), tags);
  library.def(("attention_with_lse" + arguments + ") -> (Tensor output, Tensor lse)").c_str(), tags);
  library.def("merge(Tensor outputs, Tensor lse) -> (Tensor output, Tensor lse)", tags);
}

namespace {

void register_kernels(torch::Library& library) {
  using namespace single_query;
  library.impl("attention", from_schema<&attention_kernel>);
  library.impl("attention.out", from_out_schema<&attention_out_kernel>);
  library.impl("attention_with_lse", from_schema<&attention_with_lse_kernel>);
  library.impl("merge", merge_kernel);
}

} // namespace

TORCH_LIBRARY_IMPL(single_query, CPU, library) {
  register_kernels(library);
}

TORCH_LIBRARY_IMPL(single_query, CUDA, library) {
  register_kernels(library);
}

TORCH_LIBRARY_IMPL(single_query, Meta, library) {
  using namespace single_query;
  library.impl("attention", from_schema<&attention_meta>);
  library.impl("attention.out", from_out_schema<&attention_out_meta>);
  library.impl("attention_with_lse", from_schema<&attention_with_lse_meta>);
  library.impl("merge", merge_meta);
}

TORCH_LIBRARY_IMPL(single_query, Functionalize, library) {
  using namespace single_query;
  library.impl("attention.out", from_out_schema<&attention_out_functionalized>);
}

// Inference only: the kernels themselves refuse what requires grad.
TORCH_LIBRARY_IMPL(single_query, Autograd, library) {
  for (const char* name : {"attention", "attention.out", "attention_with_lse", "merge"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
}
