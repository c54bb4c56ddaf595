#include "weights/layout_json.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "files/excerpt.h"

namespace mha::detail {
namespace {

[[noreturn]] void fail_at(const std::string& where, const char* expected,
                          const nlohmann::json& found) {
  TORCH_CHECK(false, where, ": expected ", expected, ", found ",
              found.is_primitive() ? excerpt(found.dump(-1, ' ', true)) : found.type_name());
}

std::string text_at(const std::string& where, const nlohmann::json& value) {
  if (!value.is_string()) fail_at(where, "a string", value);
  return value.get<std::string>();
}

bool flag_at(const std::string& where, const nlohmann::json& value) {
  if (!value.is_boolean()) fail_at(where, "true or false", value);
  return value.get<bool>();
}

// A string, or an array of them.
std::vector<std::string> texts_at(const std::string& where, const nlohmann::json& value) {
  if (value.is_string()) return {value.get<std::string>()};
  if (!value.is_array()) fail_at(where, "a string or an array of strings", value);
  std::vector<std::string> texts;
  for (const nlohmann::json& text : value) texts.push_back(text_at(where, text));
  return texts;
}

bool is_projection(const std::string& parameter) {
  return parameter.size() == 3 && parameter.compare(0, 2, "W_") == 0;
}

Packing packing_at(const std::string& where, const nlohmann::json& value) {
  for (const Packing packing : {Packing::rows, Packing::groups, Packing::heads}) {
    if (value == c10::str(packing)) return packing;
  }
  fail_at(where, "\"rows\", \"groups\" or \"heads\"", value);
}

// The tensors of one entry: of a linear layer two.
void append_tensors(const std::string& where, const nlohmann::json& entry,
                    std::vector<LayoutTensor>& tensors) {
  if (!entry.is_object()) fail_at(where, "an object", entry);
  LayoutTensor tensor;
  bool has_bias = true;
  for (const auto& [key, value] : entry.items()) {
    const std::string at = where + "." + key;
    if (key == "name") {
      tensor.name = text_at(at, value);
    } else if (key == "holds") {
      tensor.parameters = texts_at(at, value);
    } else if (key == "transposed") {
      tensor.transposed = flag_at(at, value);
    } else if (key == "packing") {
      tensor.packing = packing_at(at, value);
    } else if (key == "repeats") {
      if (!value.is_number_unsigned() || value.get<uint64_t>() - 1 >= 1024) {
        fail_at(at, "a whole number from 1 to 1024", value);
      }
      tensor.repeats = value.get<int64_t>();
    } else if (key == "plus") {
      if (!value.is_number()) fail_at(at, "a number", value);
      tensor.plus = value.get<double>();
    } else if (key == "bias") {
      has_bias = flag_at(at, value);
    } else {
      TORCH_CHECK(false, where,
                  ": expected name, holds, transposed, packing, repeats, plus or bias, found ",
                  excerpt(key));
    }
  }
  if (tensor.parameters.empty()) tensor.parameters = {tensor.name};
  if (!is_projection(tensor.parameters.front())) {
    tensors.push_back(std::move(tensor));
    return;
  }
  LayoutTensor bias = tensor;
  bias.transposed = false;
  const auto append = [](LayoutTensor& to, const char* kind) {
    to.name += kind;
    for (std::string& parameter : to.parameters) parameter += kind;
  };
  append(tensor, ".weight");
  append(bias, ".bias");
  tensors.push_back(std::move(tensor));
  if (has_bias) tensors.push_back(std::move(bias));
}

std::vector<LayoutTensor> tensors_at(const std::string& where, const nlohmann::json& value) {
  if (!value.is_array()) fail_at(where, "an array of objects", value);
  std::vector<LayoutTensor> tensors;
  for (size_t i = 0; i < value.size(); ++i) {
    append_tensors(where + "[" + std::to_string(i) + "]", value[i], tensors);
  }
  return tensors;
}

}  // namespace

LayoutDescription layout_from_json(const std::string& where, const nlohmann::json& json) {
  if (!json.is_object()) fail_at(where, "an object", json);
  LayoutDescription description;
  for (const auto& [key, value] : json.items()) {
    const std::string at = where + ": " + key;
    if (key == "name") {
      description.name = text_at(at, value);
    } else if (key == "tensors") {
      description.tensors = tensors_at(at, value);
    } else if (key == "tensors_apart") {
      description.tensors_apart = tensors_at(at, value);
    } else if (key == "ignored") {
      description.ignored = texts_at(at, value);
    } else if (key == "grouped_heads") {
      description.grouped_heads = flag_at(at, value);
    } else if (key == "free_head_dim") {
      description.free_head_dim = flag_at(at, value);
    } else if (key == "free_output_bias") {
      description.free_output_bias = flag_at(at, value);
    } else if (key == "told_by_names") {
      description.told_by_names = flag_at(at, value);
    } else {
      TORCH_CHECK(false, where,
                  ": expected name, tensors, tensors_apart, ignored, grouped_heads, "
                  "free_head_dim, free_output_bias or told_by_names, found ",
                  excerpt(key));
    }
  }
  return description;
}

}  // namespace mha::detail
