#include "map/map_method.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "attention/gradients.h"
#include "runtime/attention_path.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t weights_at_once = int64_t{1} << 21;

// Calls visit(part) for the parts of one head each, or of all if the view is small, whose rows
// are few enough. (A few rows of all heads would read all keys for little.) At least one part,
// since results are put together again.
template <typename Visit>
void for_each_part(const MapView& view, const Visit& visit) {
  const int64_t n = view.query.size(0), heads = view.query.size(1), rows = view.query.size(2);
  const int64_t row = n * view.key.size(2);
  const bool at_once = heads * rows * row <= weights_at_once;
  const int64_t step =
      at_once ? rows : std::max<int64_t>(weights_at_once / std::max<int64_t>(row, 1), 1);
  for (int64_t h = 0; h < (at_once ? 1 : heads); ++h) {
    const auto head = at_once ? view : select_head(view, h);
    int64_t first = 0;
    do {
      const int64_t last = std::min(first + step, rows);
      visit(MapPart{select_rows(head, first, last), h, first});
      first = last;
    } while (first < rows);
  }
}

variable_list compute_by_parts(const MapMethod& method, const MapView& view) {
  const size_t count = method.sums_rows.size();
  std::vector<variable_list> heads(count), rows(count);
  const auto end_head = [&] {
    for (size_t i = 0; i < count; ++i) {
      if (rows[i].empty()) continue;
      auto head = rows[i].size() == 1 ? rows[i][0] : at::cat(rows[i], 2);
      rows[i].clear();
      if (method.sums_heads && !heads[i].empty()) {
        heads[i][0] = heads[i][0] + head;
      } else {
        heads[i].push_back(std::move(head));
      }
    }
  };
  for_each_part(view, [&](const MapPart& part) {
    if (part.row == 0) end_head();
    const auto results = method.part(part);
    for (size_t i = 0; i < count; ++i) {
      if (method.sums_rows[i] && !rows[i].empty()) {
        rows[i][0] = rows[i][0] + results[i];
      } else {
        rows[i].push_back(results[i]);
      }
    }
  });
  end_head();
  variable_list results;
  for (const auto& parts : heads) {
    results.push_back(parts.size() == 1 ? parts[0] : at::cat(parts, 1));
  }
  return results;
}

variable_list compute(const MapMethod& method, const MapView& view) {
  return view.is_fused() ? method.fused(view) : compute_by_parts(method, view);
}

// The tensors that gradients may flow into.
variable_list inputs_of(const MapView& view) {
  variable_list inputs{view.query, view.key};
  for (const auto* list : added_lists(view.mask)) {
    inputs.insert(inputs.end(), list->begin(), list->end());
  }
  if (view.scoring.sinks.defined()) inputs.push_back(view.scoring.sinks);
  return inputs;
}

MapView with_inputs(MapView view, const variable_list& inputs) {
  view.query = inputs[0];
  view.key = inputs[1];
  auto next = inputs.begin() + 2;
  for (auto* list : added_lists(view.mask)) {
    for (auto& term : *list) term = *next++;
  }
  if (view.scoring.sinks.defined()) view.scoring.sinks = *next++;
  return view;
}

// Results and the gradients that reached them, of those that were reached.
struct Reached {
  variable_list results, grads;
};

// The part of `whole` that belongs to a part of the same kind as `like`.
at::Tensor narrow_to(const at::Tensor& whole, const at::Tensor& like, int64_t dim,
                     int64_t first) {
  return whole.size(dim) == like.size(dim) ? whole : whole.narrow(dim, first, like.size(dim));
}

Reached reached_results(const MapMethod& method, const MapPart& part,
                        const variable_list& grads) {
  const auto results = method.part(part);
  Reached reached;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!grads[i].defined()) continue;
    auto grad = narrow_to(grads[i], results[i], 1, part.head);
    if (!method.sums_rows[i]) grad = narrow_to(grad, results[i], 2, part.row);
    reached.results.push_back(results[i]);
    reached.grads.push_back(grad);
  }
  return reached;
}

// Part by part, whose weights are formed again and forgotten.
variable_list gradients_by_parts(const MapMethod& method, const MapView& view,
                                 const variable_list& grads) {
  variable_list sums;
  for (const auto& input : inputs_of(view)) sums.push_back(at::zeros_like(input.detach()));
  const int64_t group = view.query.size(1) / view.key.size(1);
  for_each_part(view, [&](const MapPart& given) {
    variable_list leaves;
    for (const auto& input : inputs_of(given.view)) {
      leaves.push_back(input.detach().requires_grad_());
    }
    variable_list found;
    {
      const at::AutoGradMode enable_grad(true);
      const MapPart part{with_inputs(given.view, leaves), given.head, given.row};
      const auto reached = reached_results(method, part, grads);
      if (reached.results.empty()) return;
      found = torch::autograd::grad(reached.results, leaves, reached.grads,
                                    /*retain_graph=*/false, /*create_graph=*/false,
                                    /*allow_unused=*/true);
    }
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i].defined()) continue;
      const bool is_key = i == 1;
      auto sum = narrow_to(sums[i], found[i], 1, is_key ? given.head / group : given.head);
      if (!is_key) sum = narrow_to(sum, found[i], 2, given.row);
      // Of a table of distances: a part's first distance is that of its last row.
      sum = narrow_to(sum, found[i], 3, sum.size(3) - found[i].size(3) - given.row);
      sum.add_(found[i]);
    }
  });
  return sums;
}

// What the backward needs beyond the inputs.
struct MapSettings : torch::CustomClassHolder {
  MapMethod method;
  MapView view;  // without the inputs, which save_for_backward keeps
};

class MapFunction : public torch::autograd::Function<MapFunction> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList given,
                               const MapView& view, const MapMethod& method) {
    variable_list inputs = given.vec();
    variable_list detached;
    for (const auto& input : inputs) detached.push_back(input.detach());
    auto results = compute(method, with_inputs(view, detached));
    auto settings = c10::make_intrusive<MapSettings>();
    settings->method = method;
    settings->method.fused = nullptr;  // if it kept a result, that would keep this node
    variable_list kept(inputs.size());
    if (view.scoring.sinks.defined()) kept.back() = detached.back();  // there are some
    settings->view = with_inputs(view, kept);
    context->save_for_backward(std::move(inputs));
    context->saved_data["settings"] = c10::IValue::make_capsule(std::move(settings));
    context->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto settings = c10::static_intrusive_pointer_cast<MapSettings>(
        context->saved_data["settings"].toCapsule());
    const bool create_graph = at::GradMode::is_enabled();
    auto inputs = context->get_saved_variables();
    if (create_graph) inputs = separate(std::move(inputs), create_graph);
    auto view = with_inputs(settings->view, inputs);
    view.statistics = {};
    auto found = create_graph ? gradients(compute_by_parts(settings->method, view), grads,
                                          inputs, Graph::recorded)
                              : gradients_by_parts(settings->method, view, grads);
    found.resize(found.size() + 2);  // none for the view and the method
    return found;
  }
};

}  // namespace

bool map_wants_gradient(const MapView& view) {
  return at::GradMode::is_enabled() && any_requires_grad(inputs_of(view));
}

std::vector<at::Tensor> apply(const MapMethod& method, const MapView& view) {
  if (!map_wants_gradient(view)) return compute(method, view);
  const auto inputs = inputs_of(view);
  if (is_followed(inputs)) return compute_by_parts(method, view);
  return MapFunction::apply(at::TensorList(inputs), view, method);
}

}  // namespace mha::detail
