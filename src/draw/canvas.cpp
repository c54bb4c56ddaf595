#include "canvas.h"

#include <algorithm>
#include <cmath>

namespace mha::draw::detail {
namespace {

/// Pixel boundary nearest to a coordinate in points.
int64_t pixel(double points) {
  return std::lround(points * Canvas::kPixelsPerPoint);
}

double distance_to_segment(Point p, Point a, Point b) {
  const double dx = b.x - a.x, dy = b.y - a.y;
  const double squared = dx * dx + dy * dy;
  double t = 0;
  if (squared > 0) t = std::clamp(((p.x - a.x) * dx + (p.y - a.y) * dy) / squared, 0.0, 1.0);
  return std::hypot(p.x - a.x - t * dx, p.y - a.y - t * dy);
}

/// The strokes of a label in pixels.
std::vector<Polyline> placed(const Label& label) {
  std::vector<Polyline> strokes = text_strokes(label.text, label.size);
  const double width = text_width(label.text, label.size);
  const double back = label.anchor == Anchor::start    ? 0
                      : label.anchor == Anchor::middle ? width / 2
                                                       : width;
  const double angle = label.angle * 3.14159265358979323846 / 180;
  const double cosine = std::cos(angle), sine = std::sin(angle);
  for (Polyline& stroke : strokes) {
    for (Point& point : stroke) {
      const double x = point.x - back, y = -point.y;
      point = {(label.at.x + x * cosine - y * sine) * Canvas::kPixelsPerPoint,
               (label.at.y + x * sine + y * cosine) * Canvas::kPixelsPerPoint};
    }
  }
  return strokes;
}

}  // namespace

Canvas::Canvas(double width, double height, Rgb paper)
    : width_(pixel(width)), height_(pixel(height)) {
  bytes_.reserve(static_cast<size_t>(3 * width_ * height_));
  for (int64_t i = 0; i < width_ * height_; ++i) {
    bytes_.insert(bytes_.end(), {paper.red, paper.green, paper.blue});
  }
}

void Canvas::fill(const Box& box, Rgb colour) {
  for (int64_t y = pixel(box.y); y < pixel(box.y + box.height); ++y) {
    for (int64_t x = pixel(box.x); x < pixel(box.x + box.width); ++x) set(x, y, colour);
  }
}

void Canvas::outline(const Box& box, Rgb colour) {
  const double line = 1 / kPixelsPerPoint;
  const double x = box.x - line, y = box.y - line;
  const double width = box.width + 2 * line, height = box.height + 2 * line;
  fill({x, y, width, line}, colour);
  fill({x, y + height - line, width, line}, colour);
  fill({x, y, line, height}, colour);
  fill({x + width - line, y, line, height}, colour);
}

void Canvas::write(const Label& label, Rgb colour) {
  const std::vector<Polyline> strokes = placed(label);
  const double pen =  // half its width in pixels
      label.size * (label.bold ? 0.062 : 0.042) * kPixelsPerPoint;
  double left = 1e9, top = 1e9, right = -1e9, bottom = -1e9;
  for (const Polyline& stroke : strokes) {
    for (const Point& point : stroke) {
      left = std::min(left, point.x);
      right = std::max(right, point.x);
      top = std::min(top, point.y);
      bottom = std::max(bottom, point.y);
    }
  }
  if (left > right) return;  // nothing but spaces
  const auto x0 = static_cast<int64_t>(std::floor(left - pen - 1));
  const auto y0 = static_cast<int64_t>(std::floor(top - pen - 1));
  const auto columns = static_cast<int64_t>(std::ceil(right + pen + 1)) - x0 + 1;
  const auto rows = static_cast<int64_t>(std::ceil(bottom + pen + 1)) - y0 + 1;

  // The strokes of a label cover together, so that they do not show where they cross.
  std::vector<double> cover(static_cast<size_t>(columns * rows), 0.0);
  for (const Polyline& stroke : strokes) {
    for (size_t i = 1; i < stroke.size(); ++i) {
      const Point a = stroke[i - 1], b = stroke[i];
      const auto first = [&](double u, double v, int64_t origin) {
        return static_cast<int64_t>(std::floor(std::min(u, v) - pen - 1)) - origin;
      };
      const auto last = [&](double u, double v, int64_t origin) {
        return static_cast<int64_t>(std::ceil(std::max(u, v) + pen + 1)) - origin;
      };
      for (int64_t y = first(a.y, b.y, y0); y <= last(a.y, b.y, y0); ++y) {
        for (int64_t x = first(a.x, b.x, x0); x <= last(a.x, b.x, x0); ++x) {
          const Point centre = {static_cast<double>(x + x0) + 0.5,
                                static_cast<double>(y + y0) + 0.5};
          const double part =
              std::clamp(pen + 0.5 - distance_to_segment(centre, a, b), 0.0, 1.0);
          double& covered = cover[static_cast<size_t>(y * columns + x)];
          covered = std::max(covered, part);
        }
      }
    }
  }
  for (int64_t y = 0; y < rows; ++y) {
    for (int64_t x = 0; x < columns; ++x) {
      const double part = cover[static_cast<size_t>(y * columns + x)];
      if (part > 0) blend(x0 + x, y0 + y, colour, part);
    }
  }
}

void Canvas::set(int64_t x, int64_t y, Rgb colour) {
  blend(x, y, colour, 1);
}

void Canvas::blend(int64_t x, int64_t y, Rgb colour, double part) {
  if (x < 0 || y < 0 || x >= width_ || y >= height_) return;
  uint8_t* pixel = bytes_.data() + 3 * (y * width_ + x);
  const auto mix = [part](uint8_t& under, uint8_t over) {
    under = static_cast<uint8_t>(std::lround(under + part * (over - under)));
  };
  mix(pixel[0], colour.red);
  mix(pixel[1], colour.green);
  mix(pixel[2], colour.blue);
}

}  // namespace mha::draw::detail
