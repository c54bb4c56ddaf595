# The component mha::draw: pictures of attention weights.
find_package(fmt REQUIRED)
find_package(PNG REQUIRED)

add_library(mha_draw
  src/draw/canvas.cpp
  src/draw/colour_map.cpp
  src/draw/file.cpp
  src/draw/html.cpp
  src/draw/label.cpp
  src/draw/painter.cpp
  src/draw/picture.cpp
  src/draw/png.cpp
  src/draw/scene.cpp
  src/draw/stroke_font.cpp
  src/draw/svg.cpp
  src/draw/terminal.cpp
  src/draw/text.cpp)
add_library(mha::draw ALIAS mha_draw)

# The page's files become strings of the library.
foreach(name page.html page.css model.js view.js page.js)
  set(file ${PROJECT_SOURCE_DIR}/src/draw/page/${name})
  string(REPLACE "." "_" variable ${name})
  file(READ ${file} ${variable})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
endforeach()
configure_file(src/draw/page.cpp.in page.cpp @ONLY)
target_sources(mha_draw PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/page.cpp)

target_include_directories(mha_draw PRIVATE src/draw src)
target_link_libraries(mha_draw
  PUBLIC mha
  PRIVATE PNG::PNG
          # Header-only, since the LibTorch wheel's fmt headers may shadow those of the linked library.
          $<BUILD_INTERFACE:fmt::fmt-header-only>
          $<BUILD_INTERFACE:nlohmann_json::nlohmann_json> $<BUILD_INTERFACE:mha_warnings>
          $<BUILD_INTERFACE:mha_messages>)
set_target_properties(mha_draw PROPERTIES
  EXPORT_NAME draw
  POSITION_INDEPENDENT_CODE ON
  UNITY_BUILD ON  # as mha
  UNITY_BUILD_BATCH_SIZE 20
  VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
