#include "reading_options.h"

#include "validators.h"

namespace mha::cli {

void ReadingOptions::add_to(CLI::App& app, CLI::Option* file) {
  app.add_option("--ignore", ignored_,
                 "A name behind the prefix to pass over, or what it begins\n"
                 "with before a *; may be repeated")
      ->check(not_empty())
      ->allow_extra_args(false)
      ->needs(file)
      ->type_name("NAME")
      ->group("Layer");
  app.add_flag("--missing-checksums", missing_checksums_,
               "Take a file of torch.save that was written without them")
      ->needs(file)
      ->group("Layer");
}

WeightFileOptions ReadingOptions::where() const {
  return WeightFileOptions().ignored(ignored_).missing_checksums(missing_checksums_);
}

}  // namespace mha::cli
