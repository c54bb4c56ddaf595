#include "help_format.h"

#include <utility>

namespace mha::cli {

std::string HelpFormat::make_option_opts(const CLI::Option* option) const {
  const std::string value = option->get_type_name();
  if (value.empty()) return {};  // a flag
  const bool may_stand_alone = option->get_expected_min() == 0;
  return (may_stand_alone ? " [" + value + ']' : ' ' + value) +
         (option->get_required() ? " REQUIRED" : "");
}

std::string HelpFormat::make_option_desc(const CLI::Option* option) const {
  const std::string value = option->get_default_str();
  if (value.empty()) return option->get_description();
  const bool may_stand_alone = option->get_expected_min() == 0;
  return option->get_description() + (may_stand_alone ? ";\nalone: " : "; default: ") + value;
}

std::string HelpFormat::make_help(const CLI::App* app, std::string name,
                                  CLI::AppFormatMode mode) const {
  // Groups leave two empty lines between them, hidden ones too.
  std::string lines;
  for (const char c : CLI::Formatter::make_help(app, std::move(name), mode)) {
    const size_t size = lines.size();
    const bool third =
        c == '\n' && size > 1 && lines[size - 1] == '\n' && lines[size - 2] == '\n';
    if (!third) lines += c;
  }
  return lines;
}

}  // namespace mha::cli
