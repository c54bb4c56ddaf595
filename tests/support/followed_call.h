#pragma once

#include <functional>
#include <vector>

#include "support/torch_headers.h"

// Calls that something follows operator by operator: traces and forward-mode derivatives.
namespace mha::test {

/// From tensors to tensors.
using Followed = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Traces `call` on `recorded` and runs the graph on `given`.
std::vector<at::Tensor> replay(const Followed& call, const std::vector<at::Tensor>& recorded,
                               const std::vector<at::Tensor>& given);

/// The directional derivatives of `call` at `inputs` along `tangents`, forward-mode; undefined
/// tangents are 0, and undefined results have none.
std::vector<at::Tensor> forward_mode(const Followed& call,
                                     const std::vector<at::Tensor>& inputs,
                                     const std::vector<at::Tensor>& tangents);

/// The same by central differences, for float64. Their error is some 1e-9 for functions of
/// unit scale.
std::vector<at::Tensor> central_differences(const Followed& call,
                                            const std::vector<at::Tensor>& inputs,
                                            const std::vector<at::Tensor>& tangents);

}  // namespace mha::test
