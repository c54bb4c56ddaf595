#include "score_numbers.h"

#include <c10/util/Exception.h>
#include <weights/find_layers.h>

#include "validators.h"

namespace mha::cli {
namespace {

constexpr const char *kScale = "--scale", *kSoftcap = "--softcap", *kEps = "--qk-norm-eps";

void check_agrees(const char* option, double given, std::optional<double> told,
                  const std::string& path) {
  TORCH_CHECK(!told || *told == given, option, ": expected ", told.value_or(0), ", as ", path,
              " says, found ", given);
}

}  // namespace

void ScoreNumbers::add_to(CLI::App& app, CLI::Option* file) {
  const auto add = [&](const char* name, std::optional<double>& number, const char* what) {
    app.add_option(name, number, what)->check(number_above_zero())->needs(file)->group("Layer");
  };
  add(kScale, scale_, "Factor of the scores; default: 1 / sqrt(head size)");
  add(kSoftcap, softcap_, "Scores stay within this of 0; default: no limit");
  add(kEps, eps_, "Of the norm of queries and keys; default: 1e-6");
}

const char* ScoreNumbers::given() const {
  return scale_ ? kScale : softcap_ ? kSoftcap : eps_ ? kEps : nullptr;
}

void ScoreNumbers::apply_to(MultiHeadAttentionOptions& options, const std::string& path,
                            const WeightFileOptions& where) const {
  if (scale_) {
    check_agrees(kScale, *scale_, options.scale(), path);
    options.scale(*scale_);
  }
  if (softcap_) {
    const bool is_told = options.softcap() > 0;
    check_agrees(kSoftcap, *softcap_,
                 is_told ? std::optional<double>(options.softcap()) : std::nullopt, path);
    options.softcap(*softcap_);
  }
  if (eps_) {
    TORCH_CHECK(options.qk_norm() != QKNorm::none, kEps,
                ": expected a layer with gains of queries and keys, found one without in ",
                path);
    const bool is_told =
        detail::open_weights(path, where)->metadata().count("mha.qk_norm_eps") != 0;
    check_agrees(kEps, *eps_,
                 is_told ? std::optional<double>(options.qk_norm_eps()) : std::nullopt, path);
    options.qk_norm_eps(*eps_);
  }
}

}  // namespace mha::cli
