#include "former_names.h"

#include <string>

namespace mha::cli {

void refuse_former_names(CLI::App& app, std::initializer_list<FormerName> names) {
  for (const FormerName& name : names) {
    const std::string former = name.former, present = name.present;
    // At once, so that no other error comes first; with a value or without.
    app.add_option_function<std::string>(former,
                                         [former, present](const std::string& /*value*/) {
                                           throw CLI::ValidationError(
                                               former,
                                               "expected " + present + ", as it is called now");
                                         })
        ->expected(0, 1)
        ->trigger_on_parse()
        ->group("");
  }
}

}  // namespace mha::cli
