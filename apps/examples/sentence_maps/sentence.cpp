#include "sentence.h"

#include <torch/torch.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

Sentence read_sentence(const std::string& path) {
  std::ifstream stream(path);
  TORCH_CHECK(stream, path, ": cannot be read");
  const auto json = nlohmann::json::parse(stream);
  return {json.at("text"), json.at("ids"), json.at("tokens")};
}

int run_example(int argc, char** argv, size_t least, const char* usage,
                void (*run)(const Arguments&)) {
  const Arguments arguments(argv + 1, argv + argc);
  if (arguments.size() < least) {
    std::cerr << "usage: " << usage << '\n';
    return 2;
  }
  try {
    run(arguments);
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return 2;
}
