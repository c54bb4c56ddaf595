#include "map/attribution_state.h"

#include "runtime/attention_path.h"

namespace mha::detail {

AttributionState::AttributionState(const MapState& map_, const at::Tensor& value_,
                                   const at::Tensor& grad_output_)
    : map(map_.detach()),
      value(value_.detach()),
      grad_output(grad_output_.detach()),
      value_version_(version_of(value)),
      grad_version_(version_of(grad_output)) {}

void AttributionState::check_unmodified() const {
  constexpr const char* subject = "AttentionAttribution";
  check_version(subject, "value", value, value_version_);
  check_version(subject, "grad_output", grad_output, grad_version_);
}

std::shared_ptr<const AttributionState> AttributionState::to(at::Device device) const {
  check_unmodified();
  return std::make_shared<AttributionState>(*map->to(device), value.to(device),
                                            grad_output.to(device));
}

MapView AttributionState::view(Attribution attribution) const {
  check_unmodified();
  auto view = map->view();
  const auto dtype = view.query.scalar_type();
  view.attribution = attribution;
  view.value = value.to(dtype);
  view.grad_output = grad_output.to(dtype);
  const auto path = choose_path(view.query.device(), dtype, view.query.size(3), value.size(3),
                                is_followed({value, grad_output}))
                        .path;
  if (path != Path::fused) view.statistics = {};
  return view;
}

}  // namespace mha::detail
