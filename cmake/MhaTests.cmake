# mha_add_test(<name> SOURCES <file>... [LIBS <target>...] [NEEDS <fixture>] [EVERY_PATH] [POISONED])
#
# One GoogleTest executable, which is one test of ctest: a process for each of its tests would spend
# minutes on loading LibTorch. Sources see tests/ and src/, since internals are tested too, and need
# not include what the shared precompiled header holds, but should. With EVERY_PATH the executable
# runs again on each narrower instruction set of the kernels, on the plain path, and there with
# LibTorch's products in another order of sums at each call; with POISONED, on memory that holds NaN
# until something is computed into it. NEEDS names a ctest fixture that must be set up before.
find_package(GTest REQUIRED)

# The executable alone, for tests that ctest is told of in another way.
function(mha_add_test_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "tests: ${name}: expected SOURCES <file>... [LIBS <target>...]")
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE mha_test_settings ${arg_LIBS})
  target_precompile_headers(${name} REUSE_FROM mha_test_pch)
endfunction()

function(mha_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "EVERY_PATH;POISONED" "NEEDS" "SOURCES;LIBS")
  mha_add_test_executable(${name} ${arg_UNPARSED_ARGUMENTS}
    SOURCES ${arg_SOURCES} $<TARGET_OBJECTS:mha_test_blas> LIBS ${arg_LIBS})
  # Threads that wait do not spin: the tests of a parallel ctest share the cores. What runs again,
  # under a sanitizer or on another path, runs on one thread.
  set(environment OMP_WAIT_POLICY=passive)
  set(environment_again ${environment} OMP_NUM_THREADS=1)
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
    set(environment ${environment_again})
  endif()
  add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
  set_tests_properties(${name} PROPERTIES
    TIMEOUT 1200 ENVIRONMENT "${environment}" FIXTURES_REQUIRED "${arg_NEEDS}")
  if(arg_POISONED AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
    add_test(NAME ${name}.poisoned COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${name}.poisoned PROPERTIES
      TIMEOUT 1200 ENVIRONMENT "${environment_again};MHA_POISON_SCRATCH=1")
  endif()
  if(arg_EVERY_PATH)
    # The widest instruction set has run already. Memory errors are the kernels' to make.
    set(settings MHA_CPU_ISA=generic MHA_CPU_ISA=avx2)
    if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
      list(APPEND settings MHA_PATH=plain MHA_TEST_BLAS=reordered)
    endif()
    foreach(setting IN LISTS settings)
      string(REGEX REPLACE ".*=" "" path ${setting})
      if(path STREQUAL reordered)
        list(APPEND setting MHA_PATH=plain)  # where all products are LibTorch's
      endif()
      add_test(NAME ${name}.on_${path} COMMAND ${name} --gtest_brief=1)
      set_tests_properties(${name}.on_${path} PROPERTIES
        TIMEOUT 1200
        ENVIRONMENT "${environment_again};${setting}"
        SKIP_REGULAR_EXPRESSION "which can run here, found")
    endforeach()
  endif()
endfunction()

# Torch's and GoogleTest's headers cost 15 seconds a file, so they are compiled once. A
# precompiled header fits only targets with the same options: all of them come from here.
add_library(mha_test_settings INTERFACE)
target_include_directories(mha_test_settings INTERFACE
  ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(mha_test_settings INTERFACE
  mha::mha mha::openmp mha_warnings GTest::gtest_main)

file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/mha_test_pch.cpp CONTENT "")
add_library(mha_test_pch OBJECT ${CMAKE_CURRENT_BINARY_DIR}/mha_test_pch.cpp)
target_link_libraries(mha_test_pch PRIVATE mha_test_settings)
target_precompile_headers(mha_test_pch PRIVATE <gtest/gtest.h> ${PROJECT_SOURCE_DIR}/tests/torch_headers.h)

# Stands in for LibTorch's BLAS where MHA_TEST_BLAS=reordered.
add_library(mha_test_blas OBJECT ${PROJECT_SOURCE_DIR}/tests/other_blas.cpp)
target_link_libraries(mha_test_blas PRIVATE mha_test_settings)
target_precompile_headers(mha_test_blas REUSE_FROM mha_test_pch)
