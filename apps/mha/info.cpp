#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <mha/cpu_isa.h>
#include <mha/version.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"
#include "explain.h"
#include "file_info.h"
#include "former_names.h"
#include "model_folder.h"
#include "reading_options.h"
#include "runtime/attention_path.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

struct Kernel {
  std::string name, what;
  bool active;
};

const char* what_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::amx:
      return "fused; float32 on the CPU, bfloat16 on its matrix tiles";
    case CpuIsa::amx_emulated:
      return "fused; as amx, for tests";
    default:
      return "fused; float32 on the CPU";
  }
}

/// Every way in which attention is computed, the one in use marked active.
std::vector<Kernel> kernels() {
  const auto forced = detail::forced_path();
  std::vector<Kernel> kernels;
  for (const CpuIsa isa : available_cpu_isas()) {
    kernels.push_back({c10::str(isa), what_of(isa), !forced && isa == cpu_isa()});
  }
  kernels.push_back({"torch", "at::scaled_dot_product_attention; float64, large heads, CUDA",
                     forced == detail::Path::torch});
  kernels.push_back({"plain", "composition in ATen calls, in blocks; for all else",
                     forced == detail::Path::plain});
  return kernels;
}

/// What stands between `key` and `end` in one of LibTorch's own reports, "unknown" if absent.
std::string value_in(const std::string& report, const std::string& key, char end) {
  const size_t found = report.find(key);
  if (found == std::string::npos) return "unknown";
  const size_t begin = found + key.size();
  return report.substr(begin, report.find(end, begin) - begin);
}

nlohmann::ordered_json information() {
  nlohmann::ordered_json kernel_list = nlohmann::ordered_json::array();
  for (const Kernel& kernel : kernels()) {
    kernel_list.push_back(
        {{"name", kernel.name}, {"what", kernel.what}, {"active", kernel.active}});
  }
  nlohmann::ordered_json info{
      {"version", version()},
      {"libtorch",
       {{"compiled", torch_version()},
        {"running", value_in(at::show_config(), "TORCH_VERSION=", ',')}}},
      {"threads", at::get_num_threads()},
      {"parallel_backend", value_in(at::get_parallel_info(), "ATen parallel backend: ", '\n')},
      {"cpu_capability", at::get_cpu_capability()},
      {"default_dtype", dtype_text(c10::get_default_dtype_as_scalartype())},
      {"kernels", kernel_list},
  };
  if (!amx_refusal().empty()) info["amx_refused"] = amx_refusal();
  return info;
}

std::string explanation_text(const nlohmann::ordered_json& explanation) {
  std::string lines;
  for (const auto& [name, sentence] : explanation.items()) {
    lines += fmt::format("{:<13}{}\n", name, sentence.get<std::string>());
  }
  return lines;
}

std::string info_text(const nlohmann::ordered_json& info) {
  const auto value = [](const nlohmann::ordered_json& json) { return json.get<std::string>(); };
  std::string lines;
  const auto line = [&lines](const char* name, const std::string& content) {
    lines += fmt::format("{:<17}{}\n", name, content);
  };
  line("mha", value(info["version"]));
  line("LibTorch", fmt::format("{} (compiled against {})", value(info["libtorch"]["running"]),
                               value(info["libtorch"]["compiled"])));
  line("threads",
       fmt::format("{} ({})", info["threads"].get<int>(), value(info["parallel_backend"])));
  line("CPU capability", value(info["cpu_capability"]));
  line("default dtype", value(info["default_dtype"]));
  const char* name = "kernels";
  for (const auto& kernel : info["kernels"]) {
    line(name, fmt::format("{} {}: {}", kernel["active"].get<bool>() ? "*" : " ",
                           value(kernel["name"]), value(kernel["what"])));
    name = "";
  }
  if (info.contains("amx_refused")) {
    line("", "  amx: not used, " + value(info["amx_refused"]));
  }
  return lines + "                 (* active)\n";
}

}  // namespace

Command info_command(CLI::App& program) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* app =
      program.add_subcommand("info", "Show versions and kernels, or a weight file's layers");
  const auto file = std::make_shared<std::string>();
  const auto explain = std::make_shared<ExplainOptions>();
  CLI::Option* model =
      app->add_option(
             "--model", *file,
             "Show the attention layers of this weight file, or\nof the model in this folder")
          ->check(not_empty())
          ->type_name("FILE");
  const auto reading = std::make_shared<ReadingOptions>();
  reading->add_to(*app, model);
  explain->add_to(*app)->excludes(model);
  app->add_flag("--json", *json, "Write JSON");
  refuse_former_names(*app, {{"--file", "--model"}, {"--weights", "--return-weights"}});
  app->footer(
      "Example: mha info --model model.safetensors\n"
      "         mha info --explain --queries 1 --keys 4096 --dtype bfloat16");
  return {app, [json, file, explain, reading] {
            if (explain->wanted()) {
              print_report(explain->explanation(), *json, explanation_text);
            } else if (is_model_folder(*file)) {
              TORCH_CHECK(reading->ignored().empty() && !reading->missing_checksums(),
                          reading->ignored().empty() ? "--missing-checksums" : "--ignore",
                          ": expected it with a file, found the folder ", *file,
                          ", of which the configuration alone is shown");
              print_report(folder_information(*file), *json, folder_text);
            } else if (!file->empty()) {
              print_report(file_information(*file, reading->where()), *json, file_text);
            } else {
              print_report(information(), *json, info_text);
            }
            return kSuccess;
          }};
}

}  // namespace mha::cli
