// Guards labels, which hold any bytes: after `printable` nothing in them acts on what shows
// them, after `xml_escaped` nothing in them is markup. And the font that draws them. All exact.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "draw/label.h"
#include "draw/stroke_font.h"

namespace mha::draw::detail {
namespace {

TEST(LabelTest, ValidUtf8ComesBackAsItWas) {
  for (const char* text : {"", "cat", "\u00e9\u0120", "\u2581the", "\u65e5\u672c", "\U0001F600",
                           "\uFFFD", "\U0010FFFD"}) {
    EXPECT_EQ(encoded(decoded(text)), text);
    EXPECT_EQ(printable(text), text);
  }
}

TEST(LabelTest, EachByteOfNoCharacterIsReplaced) {
  const std::string mark = "\uFFFD";
  EXPECT_EQ(printable("a\xff\xfe"), "a" + mark + mark);
  EXPECT_EQ(printable("\xc3"), mark);                                   // cut off
  EXPECT_EQ(printable("\xe6\x97"), mark + mark);                        // cut off
  EXPECT_EQ(printable("\xc0\xaf"), mark + mark);                        // overlong '/'
  EXPECT_EQ(printable("\xed\xa0\x80"), mark + mark + mark);             // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), mark + mark + mark + mark);  // beyond U+10FFFF
  EXPECT_EQ(printable("\xe6"
                      "a\xc3\xa9"),
            mark + "a\u00e9");  // the rest is read on
}

TEST(LabelTest, WhatActsIsWrittenAsItsEscape) {
  EXPECT_EQ(printable("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(printable("\x1b[31m"), "\\x1b[31m");
  EXPECT_EQ(printable(std::string("\0", 1)), "\\x00");
  EXPECT_EQ(printable("\u009b"
                      "31m"),
            "\\x9b31m");                      // one character for ESC [
  EXPECT_EQ(printable("\u202e"), "\\u202e");  // turns the direction of writing
  EXPECT_EQ(printable("\u200b"), "\\u200b");
  EXPECT_EQ(printable("\u2028"), "\\u2028");
  EXPECT_EQ(printable("\uFFFE"), "\\ufffe");
}

TEST(LabelTest, SpacesAloneAreSeen) {
  EXPECT_EQ(printable("  "), "\u2423\u2423");
  EXPECT_EQ(printable(" a "), " a ");
}

TEST(LabelTest, MarkupIsEscaped) {
  EXPECT_EQ(xml_escaped("<a b=\"c\" d='e'>&amp;"),
            "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;amp;");
}

TEST(LabelTest, ColumnsCountWideCharactersTwiceAndMarksNot) {
  EXPECT_EQ(columns_of("cat"), 3);
  EXPECT_EQ(columns_of("\u65e5\u672c"), 4);
  EXPECT_EQ(columns_of("e\u0301"), 1);
}

TEST(LabelTest, FittedIsNeverWiderThanItsRoom) {
  for (const char* text : {"a long token", "\u65e5\u672c\u65e5\u672c\u65e5", "short"}) {
    for (int64_t room = 1; room < 14; ++room) {
      for (const bool utf8 : {false, true}) {
        EXPECT_LE(columns_of(fitted(text, room, utf8)), room);
      }
    }
  }
  EXPECT_EQ(fitted("short", 5, true), "short");
  EXPECT_EQ(fitted("longer", 5, true), "long\u2026");
  EXPECT_EQ(fitted("\u00e9t\u00e9", 5, false), "?t?");
}

// --- the font ---

TEST(StrokeFontTest, EveryLetterHasStrokesWithinItsRoom) {
  for (char c = '!'; c <= '~'; ++c) {
    const std::string text(1, c);
    const double width = text_width(text, kEm);
    const auto strokes = text_strokes(text, kEm);
    EXPECT_FALSE(strokes.empty()) << c;
    for (const Polyline& stroke : strokes) {
      EXPECT_GE(stroke.size(), 2u) << c;
      for (const Point& point : stroke) {
        EXPECT_GE(point.x, 0) << c;
        EXPECT_LE(point.x, width) << c;
        EXPECT_GE(point.y, -5) << c;
        EXPECT_LE(point.y, 17) << c;
      }
    }
  }
}

// The strokes as text, to be compared.
std::string shape(const std::string& text) {
  std::string result;
  for (const Polyline& stroke : text_strokes(text, kEm)) {
    for (const Point& point : stroke) {
      result += std::to_string(point.x) + ',' + std::to_string(point.y) + ' ';
    }
    result += '\n';
  }
  return result;
}

TEST(StrokeFontTest, NoTwoLettersLookAlike) {
  std::set<std::string> shapes;
  for (char c = '!'; c <= '~'; ++c) shapes.insert(shape(std::string(1, c)));
  EXPECT_EQ(shapes.size(), static_cast<size_t>('~' - '!' + 1));
}

TEST(StrokeFontTest, AccentedLettersAreTheLetterWithAMark) {
  EXPECT_EQ(shape("\u00e9").rfind(shape("e"), 0), 0u);
  EXPECT_NE(shape("\u00e9"), shape("e"));
  EXPECT_NE(shape("\u00e9"), shape("\u00e8"));
  EXPECT_EQ(shape("\u0120").rfind(shape("G"), 0), 0u);  // GPT-2's sign for a space
  EXPECT_EQ(text_width("\u017e", 10), text_width("z", 10));
}

TEST(StrokeFontTest, WhatItLacksIsABox) {
  const std::string box = shape("\u65e5");
  EXPECT_NE(box, "");
  EXPECT_EQ(shape("\U0001F600"), box);
  EXPECT_NE(shape("\u2581"), box);  // SentencePiece's sign for a space
}

TEST(StrokeFontTest, SizeScalesEverything) {
  EXPECT_DOUBLE_EQ(text_width("cat", 20), 2 * text_width("cat", 10));
}

}  // namespace
}  // namespace mha::draw::detail
