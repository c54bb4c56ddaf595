#include <c10/util/Exception.h>
#include <mha/draw.h>
#include <png.h>

#include <csetjmp>
#include <string>
#include <vector>

#include "canvas.h"
#include "colour_map.h"
#include "picture.h"
#include "scene.h"

namespace mha::draw {
namespace {

using detail::Box;
using detail::Canvas;
using detail::Rgb;

constexpr Rgb kPaper = {255, 255, 255}, kStrong = {28, 30, 36}, kMuted = {84, 90, 102},
              kLine = {190, 194, 202};

void append(png_structp writer, png_bytep data, png_size_t size) {
  static_cast<std::string*>(png_get_io_ptr(writer))
      ->append(reinterpret_cast<const char*>(data), size);
}
void flush(png_structp) {}

/// libpng's own error handling prints and jumps; the jump must cross no destructor.
bool encode(png_structp writer, png_infop info, const Canvas& canvas,
            std::vector<png_bytep>& rows, std::string& bytes) {
  if (setjmp(png_jmpbuf(writer)) != 0) return false;
  png_set_write_fn(writer, &bytes, append, flush);
  png_set_IHDR(writer, info, static_cast<png_uint_32>(canvas.width()),
               static_cast<png_uint_32>(canvas.height()), 8, PNG_COLOR_TYPE_RGB,
               PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  constexpr double kPointsPerMetre = 96 / 0.0254;
  const auto density = static_cast<png_uint_32>(Canvas::kPixelsPerPoint * kPointsPerMetre);
  png_set_pHYs(writer, info, density, density, PNG_RESOLUTION_METER);
  png_set_rows(writer, info, rows.data());
  png_write_png(writer, info, PNG_TRANSFORM_IDENTITY, nullptr);
  return true;
}

std::string encoded_png(const Canvas& canvas) {
  std::vector<png_bytep> rows;
  for (int64_t y = 0; y < canvas.height(); ++y) {
    // libpng takes rows that it does not change by pointers to what may change.
    rows.push_back(const_cast<png_bytep>(canvas.bytes().data() + 3 * y * canvas.width()));
  }
  std::string bytes, problem;
  const auto report = [](png_structp reporter, png_const_charp message) {
    *static_cast<std::string*>(png_get_error_ptr(reporter)) = message;
    png_longjmp(reporter, 1);
  };
  png_structp writer = png_create_write_struct(PNG_LIBPNG_VER_STRING, &problem, report,
                                               [](png_structp, png_const_charp) {});
  TORCH_CHECK(writer != nullptr, "libpng ", PNG_LIBPNG_VER_STRING, " could not be started");
  png_infop info = png_create_info_struct(writer);
  const bool done = info != nullptr && encode(writer, info, canvas, rows, bytes);
  png_destroy_write_struct(&writer, &info);
  TORCH_CHECK(done, "libpng: ", problem);
  return bytes;
}

void draw_panel(Canvas& canvas, const detail::Picture& picture, const detail::Scene& scene,
                size_t index) {
  const Box& box = scene.panels[index];
  canvas.outline(box, kLine);
  for (int64_t row = 0; row < picture.queries.cells; ++row) {
    for (int64_t column = 0; column < picture.keys.cells; ++column) {
      const float value = picture.value(picture.panels[index], row, column);
      if (value < 0) continue;
      canvas.fill({box.x + static_cast<double>(column) * scene.cell_width,
                   box.y + static_cast<double>(row) * scene.cell_height, scene.cell_width,
                   scene.cell_height},
                  detail::colour_at(picture.colours, picture.position(value)));
    }
  }
}

void draw_bar(Canvas& canvas, const detail::Picture& picture, const detail::Scene& scene) {
  const Box& bar = scene.bar;
  canvas.outline(bar, kLine);
  constexpr double step = 1 / Canvas::kPixelsPerPoint;
  for (double y = 0; y < bar.height; y += step) {
    const double position = 1 - (y + step / 2) / bar.height;
    canvas.fill({bar.x, bar.y + y, bar.width, step},
                detail::colour_at(picture.colours, position));
  }
  for (const double y : scene.tick_heights) {
    canvas.fill({bar.x + bar.width, y - step / 2, 4, step}, kMuted);
  }
}

}  // namespace

std::string png(const Maps& maps, const Options& options) {
  const int64_t most = detail::most_cells(detail::heads_of(maps));
  const detail::Picture picture = detail::picture_of(maps, options, most, most);
  const detail::Scene scene = detail::scene_of(picture);
  Canvas canvas(scene.width, scene.height, kPaper);
  for (size_t i = 0; i < picture.panels.size(); ++i) draw_panel(canvas, picture, scene, i);
  draw_bar(canvas, picture, scene);
  for (const detail::Label& label : scene.labels) {
    canvas.write(label, label.ink == detail::Ink::strong ? kStrong : kMuted);
  }
  return encoded_png(canvas);
}

}  // namespace mha::draw
