#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// What word_pieces.py wrote of a sentence.
struct Sentence {
  std::string text;
  std::vector<int64_t> ids;
  std::vector<std::string> tokens;
};

Sentence read_sentence(const std::string& path);

using Arguments = std::vector<std::string>;

/// `main` of a program that takes at least `least` arguments: calls `run` with them, and puts
/// what it throws into words.
int run_example(int argc, char** argv, size_t least, const char* usage,
                void (*run)(const Arguments&));
