# Options that the library, its apps and its tests share.
add_library(mha_warnings INTERFACE)
target_compile_options(mha_warnings INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor
  $<$<BOOL:${MHA_WARNINGS_AS_ERRORS}>:-Werror>)

# Numbers in error messages whatever the locale, in every file that is not a kernel.
add_library(mha_messages INTERFACE)
target_compile_options(mha_messages INTERFACE
  "SHELL:-include ${PROJECT_SOURCE_DIR}/src/runtime/message.h")

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
endif()
