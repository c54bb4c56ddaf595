#include "label.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace mha::draw::detail {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

struct Range {
  char32_t first, last;
};

template <size_t N>
bool is_in(const std::array<Range, N>& ranges, char32_t character) {
  return std::any_of(ranges.begin(), ranges.end(), [character](const Range& range) {
    return range.first <= character && character <= range.last;
  });
}

// Controls, then what has no width or turns the direction of writing, then tags and
// noncharacters.
constexpr std::array<Range, 11> kActing = {{{0x00, 0x1F},
                                            {0x7F, 0x9F},
                                            {0xAD, 0xAD},
                                            {0x61C, 0x61C},
                                            {0x180E, 0x180E},
                                            {0x200B, 0x200F},
                                            {0x2028, 0x202E},
                                            {0x2060, 0x206F},
                                            {0xFEFF, 0xFEFF},
                                            {0xFFF9, 0xFFFB},
                                            {0xE0000, 0xE0FFF}}};

// Marks that combine with the character before them, and the letters that terminals show wide.
constexpr std::array<Range, 5> kCombining = {
    {{0x300, 0x36F}, {0x483, 0x489}, {0x1AB0, 0x1AFF}, {0x20D0, 0x20FF}, {0xFE00, 0xFE0F}}};
constexpr std::array<Range, 9> kWide = {{{0x1100, 0x115F},
                                         {0x2E80, 0x303E},
                                         {0x3041, 0xA4CF},
                                         {0xAC00, 0xD7A3},
                                         {0xF900, 0xFAFF},
                                         {0xFE30, 0xFE6F},
                                         {0xFF00, 0xFF60},
                                         {0x1F300, 0x1FAFF},
                                         {0x20000, 0x3FFFD}}};

/// Length of the sequence that starts with `lead`; 0 if none does.
size_t sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  return lead >= 0xF0 && lead < 0xF5 ? 4 : 0;
}

/// The character of a whole sequence; U+FFFD for an overlong one, a surrogate or a broken one.
char32_t character_of(std::string_view sequence) {
  constexpr std::array<char32_t, 5> smallest = {0, 0, 0x80, 0x800, 0x10000};
  const size_t length = sequence.size();
  auto value = static_cast<char32_t>(static_cast<unsigned char>(sequence[0]));
  if (length > 1) value &= 0x7Fu >> length;
  for (size_t i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(sequence[i]);
    if ((byte & 0xC0) != 0x80) return kReplacement;
    value = value << 6 | (byte & 0x3F);
  }
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  const bool valid = value >= smallest[length] && value <= 0x10FFFF && !surrogate;
  return valid ? value : kReplacement;
}

int64_t columns_of_character(char32_t character) {
  if (is_in(kCombining, character)) return 0;
  return is_in(kWide, character) ? 2 : 1;
}

int64_t columns_of_characters(std::u32string_view characters) {
  int64_t columns = 0;
  for (const char32_t character : characters) columns += columns_of_character(character);
  return columns;
}

std::string escape_of(char32_t character) {
  switch (character) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      break;
  }
  const auto code = static_cast<uint32_t>(character);
  return code < 0x100 ? fmt::format("\\x{:02x}", code) : fmt::format("\\u{:04x}", code);
}

}  // namespace

std::u32string decoded(std::string_view utf8) {
  std::u32string characters;
  while (!utf8.empty()) {
    const size_t length = sequence_length(static_cast<unsigned char>(utf8[0]));
    char32_t character = kReplacement;
    if (length > 0 && length <= utf8.size()) character = character_of(utf8.substr(0, length));
    const bool is_replacement = length == 3 && utf8.substr(0, 3) == "\xEF\xBF\xBD";
    utf8.remove_prefix(character != kReplacement || is_replacement ? length : 1);
    characters += character;
  }
  return characters;
}

std::string encoded(std::u32string_view characters) {
  std::string bytes;
  for (const char32_t character : characters) {
    const auto code = static_cast<uint32_t>(character);
    const auto tail = [&](int shift) {
      bytes += static_cast<char>(0x80 | (code >> shift & 0x3F));
    };
    if (code < 0x80) {
      bytes += static_cast<char>(code);
    } else if (code < 0x800) {
      bytes += static_cast<char>(0xC0 | code >> 6);
      tail(0);
    } else if (code < 0x10000) {
      bytes += static_cast<char>(0xE0 | code >> 12);
      tail(6);
      tail(0);
    } else {
      bytes += static_cast<char>(0xF0 | code >> 18);
      tail(12);
      tail(6);
      tail(0);
    }
  }
  return bytes;
}

std::string printable(std::string_view label) {
  std::string result;
  bool only_spaces = !label.empty();
  for (const char32_t character : decoded(label)) {
    only_spaces = only_spaces && character == ' ';
    const bool noncharacter = (character & 0xFFFE) == 0xFFFE;
    result += is_in(kActing, character) || noncharacter ? escape_of(character)
                                                        : encoded({&character, 1});
  }
  if (!only_spaces) return result;
  std::string shown;
  for (size_t i = 0; i < label.size(); ++i) shown += "\u2423";
  return shown;
}

int64_t columns_of(std::string_view label) {
  return columns_of_characters(decoded(label));
}

std::string fitted(std::string_view label, int64_t columns, bool utf8) {
  std::u32string characters = decoded(label);
  if (!utf8) {
    for (char32_t& character : characters) {
      if (character > '~') character = '?';
    }
  }
  int64_t used = 0;
  size_t kept = 0;  // what leaves room for the ellipsis
  for (size_t i = 0; i < characters.size(); ++i) {
    used += columns_of_character(characters[i]);
    if (used < columns) kept = i + 1;
    if (used > columns) {
      characters.resize(kept);
      characters += utf8 ? U'\u2026' : U'.';
      break;
    }
  }
  return encoded(characters);
}

std::string xml_escaped(std::string_view label) {
  std::string escaped;
  for (const char c : label) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

}  // namespace mha::draw::detail
