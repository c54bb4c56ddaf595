// Guards the formats: what is in a file is what the weights say. PNG is decoded by libpng, the
// paths of SVG and the numbers of HTML are read back. Colours are exact; HTML stores the root
// of a weight in 16 bits, so half a step of it is what a weight may be off.
#include <gtest/gtest.h>
#include <mha/draw.h>
#include <png.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "draw/colour_map.h"
#include "draw/picture.h"
#include "draw/scene.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::draw {
namespace {

using detail::Rgb;
using test::contains;

std::string hex(Rgb colour) {
  char text[8];
  std::snprintf(text, sizeof(text), "#%02x%02x%02x", colour.red, colour.green, colour.blue);
  return text;
}

// Causal maps with labels of every kind.
Maps some_maps(int64_t heads, int64_t length) {
  test::Random random(5);
  Maps maps;
  maps.weights = random.normal({heads, length, length});
  maps.weights.masked_fill_(at::ones({length, length}, at::kBool).triu(1), -INFINITY);
  maps.weights = maps.weights.softmax(-1);
  for (int64_t i = 0; i < length; ++i) maps.queries.push_back("t" + std::to_string(i));
  maps.queries[0] = "<script>alert(1)</script>";
  maps.queries[1] = "\x1b[31m\xff\"'&";
  maps.keys = maps.queries;
  maps.title = "</title><b>T</b> \x1b[2J";
  return maps;
}

std::string cell_colour(const detail::Picture& picture, const Maps& maps, int64_t head,
                        int64_t row, int64_t column) {
  const double weight = maps.weights[head][row][column].item<double>();
  if (weight == 0) return "blank";
  const double largest = maps.weights.max().item<double>();
  return hex(detail::colour_at(picture.colours, std::sqrt(weight / largest)));
}

// --- PNG ---

struct Image {
  int64_t width, height;
  std::vector<uint8_t> bytes;
  std::string at(double x, double y) const {  // in points of the scene
    const auto column = static_cast<int64_t>(x * 2), row = static_cast<int64_t>(y * 2);
    const uint8_t* pixel = bytes.data() + 3 * (row * width + column);
    return hex({pixel[0], pixel[1], pixel[2]});
  }
};

Image decoded_png(const std::string& file) {
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  if (png_image_begin_read_from_memory(&header, file.data(), file.size()) == 0) {
    throw std::runtime_error(header.message);
  }
  header.format = PNG_FORMAT_RGB;
  Image image{header.width, header.height, {}};
  image.bytes.resize(PNG_IMAGE_SIZE(header));
  if (png_image_finish_read(&header, nullptr, image.bytes.data(), 0, nullptr) == 0) {
    throw std::runtime_error(header.message);
  }
  return image;
}

TEST(PngTest, EveryCellHasTheColourOfItsWeight) {
  const Maps maps = some_maps(3, 9);
  const detail::Picture picture = detail::picture_of(maps, {}, 99, 99);
  const detail::Scene scene = detail::scene_of(picture);
  const Image image = decoded_png(png(maps));
  EXPECT_EQ(image.width, 2 * scene.width);
  EXPECT_EQ(image.height, 2 * scene.height);
  for (int64_t head = 0; head < 3; ++head) {
    const detail::Box& box = scene.panels[static_cast<size_t>(head)];
    for (int64_t row = 0; row < 9; ++row) {
      for (int64_t column = 0; column < 9; ++column) {
        std::string expected = cell_colour(picture, maps, head, row, column);
        if (expected == "blank") expected = "#ffffff";
        // A corner of the cell and its middle.
        const double x = box.x + static_cast<double>(column) * scene.cell_width;
        const double y = box.y + static_cast<double>(row) * scene.cell_height;
        EXPECT_EQ(image.at(x, y), expected);
        EXPECT_EQ(image.at(x + scene.cell_width / 2, y + scene.cell_height / 2), expected);
      }
    }
  }
}

TEST(PngTest, TheBarGoesFromTheFirstColourToTheLast) {
  for (const ColourMap map : {ColourMap::dusk, ColourMap::ink, ColourMap::grey}) {
    const Maps maps = some_maps(1, 6);
    const Options options = Options().colours(map);
    const detail::Box bar = detail::scene_of(detail::picture_of(maps, options, 99, 99)).bar;
    const Image image = decoded_png(png(maps, options));
    EXPECT_EQ(image.at(bar.x + 2, bar.y), hex(detail::colour_table(map).back()));
    EXPECT_EQ(image.at(bar.x + 2, bar.y + bar.height - 0.5),
              hex(detail::colour_table(map).front()));
  }
}

TEST(PngTest, EveryLabelLeavesInkAndNoneLeavesThePicture) {
  for (const int64_t heads : {1, 12}) {
    const Maps maps = some_maps(heads, 8);
    const detail::Scene scene = detail::scene_of(detail::picture_of(maps, {}, 99, 99));
    const Image image = decoded_png(png(maps));
    for (const detail::Label& label : scene.labels) {
      // Along the text's middle line; most characters cross it somewhere.
      const double width = detail::text_width(label.text, label.size);
      const double back = label.anchor == detail::Anchor::start    ? 0
                          : label.anchor == detail::Anchor::middle ? width / 2
                                                                   : width;
      const double angle = label.angle * 3.14159265 / 180;
      int inked = 0;
      for (double along = -back; along < width - back; along += 0.25) {
        const double up = -0.2 * label.size;
        const double x = label.at.x + along * std::cos(angle) - up * std::sin(angle);
        const double y = label.at.y + along * std::sin(angle) + up * std::cos(angle);
        ASSERT_TRUE(x > 0 && y > 0 && x < scene.width && y < scene.height) << label.text;
        inked += image.at(x, y) != "#ffffff" ? 1 : 0;
      }
      EXPECT_GT(inked, 0) << label.text;
    }
  }
}

TEST(PngTest, ALongMapIsPooledAndItsCellsStayWholePixels) {
  const Maps maps = [] {
    Maps long_maps;
    long_maps.weights = at::full({1, 2000, 1500}, 1.0 / 1500);
    return long_maps;
  }();
  const Image image = decoded_png(png(maps));
  EXPECT_LT(image.width, 2000);
  EXPECT_LT(image.height, 2000);
}

// --- SVG ---

TEST(SvgTest, ThePathsOfAColourCoverTheCellsOfThatColour) {
  const Maps maps = some_maps(2, 7);
  const detail::Picture picture = detail::picture_of(maps, {}, 99, 99);
  const detail::Scene scene = detail::scene_of(picture);
  std::map<std::string, double> expected, found;
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t row = 0; row < 7; ++row) {
      for (int64_t column = 0; column < 7; ++column) {
        expected[cell_colour(picture, maps, head, row, column)] += 1;
      }
    }
  }
  expected.erase("blank");
  const std::string document = svg(maps);
  const std::regex path("<path fill=\"(#[0-9a-f]{6})\" d=\"([^\"]*)\"/>");
  const std::regex rectangle("M([0-9.]+) ([0-9.]+)h([0-9.]+)v([0-9.]+)h-([0-9.]+)z");
  const std::sregex_iterator end;
  for (std::sregex_iterator p(document.begin(), document.end(), path); p != end; ++p) {
    const std::string d = (*p)[2];
    for (std::sregex_iterator r(d.begin(), d.end(), rectangle); r != end; ++r) {
      found[(*p)[1]] +=
          std::stod((*r)[3]) * std::stod((*r)[4]) / scene.cell_width / scene.cell_height;
    }
  }
  EXPECT_EQ(found, expected);
}

TEST(SvgTest, LabelsAreTextAndNoMarkup) {
  const std::string document = svg(some_maps(1, 5));
  EXPECT_FALSE(contains(document, "<script"));
  EXPECT_FALSE(contains(document, "<b>"));
  EXPECT_FALSE(contains(document, "\x1b"));
  EXPECT_TRUE(contains(document, ">&lt;script&gt;alert(1)"));
  EXPECT_TRUE(contains(document, "\\x1b[31m\uFFFD&quot;&#39;&amp;</text>"));
}

TEST(SvgTest, ALargeGridStaysSmall) {
  Maps maps;
  maps.weights = at::rand({16, 600, 600});
  EXPECT_LT(svg(maps).size(), 8u << 20);
}

// --- HTML ---

std::vector<uint8_t> from_base64(const std::string& text) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<uint8_t> bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<uint32_t>(digits.find(c));
    count += 6;
    if (count >= 8) bytes.push_back(static_cast<uint8_t>(bits >> (count -= 8)));
  }
  return bytes;
}

nlohmann::json data_of(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const size_t from = page.find(begin) + begin.size();
  return nlohmann::json::parse(page.substr(from, page.find("</script>", from) - from));
}

TEST(HtmlTest, ThePageHoldsTheWeights) {
  const Maps maps = some_maps(3, 11);
  const nlohmann::json data = data_of(html(maps));
  const std::vector<uint8_t> bytes = from_base64(data["values"]);
  const at::Tensor weights = maps.weights.contiguous();
  const double largest = weights.max().item<double>();
  ASSERT_EQ(bytes.size(), 2u * 3 * 11 * 11);
  for (int64_t i = 0; i < weights.numel(); ++i) {
    const int code = bytes[static_cast<size_t>(2 * i)] | bytes[static_cast<size_t>(2 * i + 1)]
                                                             << 8;
    const double weight = weights.data_ptr<float>()[i];
    if (weight == 0) {
      EXPECT_EQ(code, 0);
    } else {
      EXPECT_NEAR((code - 1) / 65534.0, std::sqrt(weight / largest), 0.51 / 65534);
    }
  }
  EXPECT_EQ(data["names"], nlohmann::json({"head 0", "head 1", "head 2"}));
  EXPECT_EQ(data["queries"]["labels"][1], "\\x1b[31m\uFFFD\"'&");
}

TEST(HtmlTest, LabelsEndNoElementAndLoadNothing) {
  const std::string page = html(some_maps(2, 5));
  EXPECT_FALSE(contains(page, "<script>alert"));
  EXPECT_FALSE(contains(page, "<b>T"));
  EXPECT_TRUE(contains(page, "<title>&lt;/title&gt;"));
  EXPECT_FALSE(std::regex_search(page, std::regex("(https?:)?//[a-z]+\\.[a-z]")));
  EXPECT_TRUE(contains(page, "default-src 'none'"));
}

TEST(HtmlTest, ALabelThatLooksLikeAPlaceOfThePageIsALabel) {
  Maps maps = some_maps(1, 3);
  maps.title = "@DATA@ @SCRIPT@";
  const std::string page = html(maps);
  EXPECT_TRUE(contains(page, "<title>@DATA@ @SCRIPT@</title>"));
  EXPECT_EQ(data_of(page)["title"], "@DATA@ @SCRIPT@");
}

TEST(HtmlTest, TwelveHeadsOf512TokensAreNotPooled) {
  Maps maps;
  maps.weights = at::full({12, 512, 512}, 1.0 / 512);
  const nlohmann::json data = data_of(html(maps));
  EXPECT_EQ(data["queries"]["cells"], 512);
  EXPECT_EQ(from_base64(data["values"]).size(), 2u * 12 * 512 * 512);
}

// --- text ---

TEST(TextTest, LabelsSendNothingToTheTerminal) {
  Terminal terminal;
  terminal.colours = Colours::rgb;
  terminal.utf8 = true;
  const std::string lines = text(some_maps(2, 5), terminal);
  const std::string without_colours =
      std::regex_replace(lines, std::regex("\x1b\\[([34]8;2;[0-9;]+|[34]9|0)m"), "");
  EXPECT_FALSE(contains(without_colours, "\x1b"));
  EXPECT_TRUE(contains(lines, "\\x1b[31m"));
}

TEST(TextTest, KeysOfAnotherSequenceAreListed) {
  Maps maps;
  maps.weights = at::full({2, 3}, 1.0 / 3);
  maps.queries = {"ein", "Hund"};
  maps.keys = {"a", "dog", "\u00e9"};
  const std::string lines = text(maps, Terminal{});
  EXPECT_TRUE(contains(lines, "keys: 0 a, 1 dog, 2 ?")) << lines;
  EXPECT_TRUE(contains(lines, "1 Hund")) << lines;
  maps.keys = {};
  EXPECT_FALSE(contains(text(maps, Terminal{}), "keys:"));
}

// --- files ---

TEST(SaveTest, TheEndingDecidesTheFormat) {
  const test::TemporaryDirectory directory;
  const Maps maps = some_maps(1, 4);
  const auto saved = [&](const char* name) {
    save(maps, directory.file(name));
    return test::read_bytes(directory.file(name));
  };
  EXPECT_EQ(saved("a.png"), png(maps));
  EXPECT_EQ(saved("a.SVG"), svg(maps));
  EXPECT_EQ(saved("a.html"), html(maps));
  EXPECT_EQ(directory.count(), 3);
  EXPECT_TRUE(contains(test::error_of([&] { save(maps, directory.file("a.jpeg")); }),
                       "expected a name that ends in .png, .svg or .html, found"));
}

TEST(SaveTest, AFileThatCannotBeWrittenIsAnErrorAndLeavesNothing) {
  const test::TemporaryDirectory directory;
  const Maps maps = some_maps(1, 4);
  EXPECT_TRUE(contains(test::error_of([&] { save(maps, directory.file("no-folder/a.png")); }),
                       "a.png: cannot be written: "));
  std::filesystem::create_directory(directory.file("b.png"));
  EXPECT_TRUE(contains(test::error_of([&] { save(maps, directory.file("b.png")); }),
                       "b.png: expected a regular file"));
  EXPECT_EQ(directory.count(), 1);
}

TEST(SaveTest, AFileKeepsItsModeALinkIsWrittenThroughAndANameMayBeLong) {
  const test::TemporaryDirectory directory;
  const Maps maps = some_maps(1, 4);
  const std::string target = directory.file(std::string(251, 'n') + ".svg");
  std::filesystem::create_symlink(target, directory.file("link.svg"));
  save(maps, directory.file("link.svg"));
  const auto mode = std::filesystem::perms::owner_read | std::filesystem::perms::owner_write;
  std::filesystem::permissions(target, mode);
  save(maps, target);
  EXPECT_EQ(std::filesystem::status(target).permissions(), mode);
  EXPECT_EQ(test::read_bytes(target), svg(maps));
  EXPECT_TRUE(std::filesystem::is_symlink(directory.file("link.svg")));
  const std::string cut = directory.file("b.png") + std::string("\0.png", 5);
  EXPECT_TRUE(contains(test::error_of([&] { save(maps, cut); }), "b.png\\x00.png'"));
  EXPECT_EQ(directory.count(), 2);
}

TEST(SaveTest, ThreadsThatWriteOneFileLeaveAWholeOne) {
  const test::TemporaryDirectory directory;
  const Maps maps = some_maps(1, 4);
  std::vector<std::thread> threads;
  std::vector<std::string> errors(4);
  for (std::string& error : errors) {
    threads.emplace_back([&] {
      error = test::error_of([&] {
        for (int repeat = 0; repeat < 20; ++repeat) save(maps, directory.file("a.svg"));
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "no error");
  EXPECT_EQ(test::read_bytes(directory.file("a.svg")), svg(maps));
  EXPECT_EQ(directory.count(), 1);
}

}  // namespace
}  // namespace mha::draw
