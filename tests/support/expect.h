#pragma once

#include <gtest/gtest.h>
#include <mha/scaled_dot_product_attention.h>

#include <cctype>
#include <functional>
#include <initializer_list>
#include <string>

#include "support/support.h"
#include "support/torch_headers.h"

// What the contract tests say of errors, masks and leaves, beside the comparisons of support.h.
namespace mha::test {

/// A defined tensor of zeros: NaN fails.
inline ::testing::AssertionResult all_zero(const at::Tensor& t) {
  if (!t.defined()) return ::testing::AssertionFailure() << "an undefined tensor";
  return is_close(t, at::zeros_like(t), 0.0);
}

/// Whether `text` has `word` as a word of its own: "3" is not in "13", "query" not in "query2".
inline bool has_word(const std::string& text, const std::string& word) {
  const auto joins = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    const bool open = at == 0 || !joins(text[at - 1]) || !joins(word.front());
    const bool closed = end == text.size() || !joins(text[end]) || !joins(word.back());
    if (open && closed) return true;
  }
  return false;
}

/// `call` throws a `c10::Error` that is the caller's to read: it has every one of `words` (the
/// argument, what was expected, what was found) and is no internal assertion.
inline ::testing::AssertionResult refuses(const std::function<void()>& call,
                                          std::initializer_list<std::string> words) {
  std::string message;
  try {
    call();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    return ::testing::AssertionFailure() << "not a c10::Error: " << error.what();
  }
  if (message.empty()) return ::testing::AssertionFailure() << "nothing was thrown";
  if (message.find("INTERNAL ASSERT") != std::string::npos) {
    return ::testing::AssertionFailure() << "an internal assertion: " << message;
  }
  for (const std::string& word : words) {
    if (!has_word(message, word)) {
      return ::testing::AssertionFailure() << "'" << word << "' is not named in: " << message;
    }
  }
  return ::testing::AssertionSuccess();
}

/// N, H, L and S of a call.
struct Sizes {
  int64_t n, h, l, s;
};

/// The weights (N, H, L, S) of a call whose scores are all 0: 1 / count over the allowed keys.
inline at::Tensor uniform_weights(const Mask& mask, const Sizes& sizes) {
  const auto options = at::TensorOptions(at::kDouble);
  const auto query = at::zeros({sizes.n, sizes.h, sizes.l, 1}, options);
  const auto key = at::zeros({sizes.n, sizes.h, sizes.s, 1}, options);
  return mha::scaled_dot_product_attention(query, key, key, mask).weights;
}

/// A map (L, S) as text, a word for each query: 'x' where the weight is not 0, else '.'.
inline std::string picture(const at::Tensor& map) {
  std::string text;
  for (int64_t i = 0; i < map.size(0); ++i) {
    if (i > 0) text += ' ';
    for (int64_t j = 0; j < map.size(1); ++j) {
      text += map[i][j].item<double>() != 0.0 ? 'x' : '.';
    }
  }
  return text;
}

/// What each query of sample 0 and head 0 sees.
inline std::string visible(const Mask& mask, const Sizes& sizes) {
  return picture(uniform_weights(mask, sizes)[0][0]);
}

/// A leaf that asks for its gradient, holding a copy of `t`.
inline at::Tensor leaf(const at::Tensor& t) {
  return t.detach().clone().requires_grad_();
}

}  // namespace mha::test
