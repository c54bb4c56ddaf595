#include "memory.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "machine.h"

namespace mha::cli {

void check_memory(const std::string& what, double bytes) {
  const double available = bench::available_memory();
  TORCH_CHECK(bytes <= available, what, ": expected at most the ",
              fmt::format("{:.3g} GB of memory that are free, found {:.3g} GB", available / 1e9,
                          bytes / 1e9));
}

std::string in_our_words(const std::string& message) {
  const std::string asked = "you tried to allocate ";
  const size_t found = message.find(asked);
  const bool is_torchs = found != std::string::npos;
  if (!is_torchs && message != "std::bad_alloc") return message;
  std::string size;
  if (is_torchs) {
    const size_t begin = found + asked.size();
    size = " for " +
           message.substr(begin, message.find_first_not_of("0123456789", begin) - begin) +
           " bytes";
  }
  return "memory: expected room for what the arguments and files ask for, found none" + size;
}

}  // namespace mha::cli
