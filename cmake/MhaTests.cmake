# mha_add_test(<name> SOURCES <file>... [ALONE <file>...] [LIBS <target>...] [NEEDS <fixture>]
#              [EVERY_PATH] [POISONED])
#
# One GoogleTest executable, which is one test of ctest: a process for each of its tests would spend
# minutes on loading LibTorch. Sources see tests/ and src/, since internals are tested too, and need
# not include what the shared precompiled header holds, but should. With EVERY_PATH the executable
# runs again on each instruction set of the kernels by name (ctest shows as skipped those that the CPU
# lacks, and the widest, on which the first run is), on the plain path, and there with LibTorch's
# products in another order of sums at each call; with POISONED, on memory that holds NaN until
# something is computed into it. Sources are compiled four at a time, but for those
# that stand ALONE since other files have names of theirs in an anonymous namespace, too. NEEDS names
# a ctest fixture that must be set up before.
find_package(GTest REQUIRED)

# The executable alone, for tests that ctest is told of in another way.
function(mha_add_test_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;ALONE;LIBS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "tests: ${name}: expected SOURCES <file>... [ALONE <file>...] [LIBS <target>...]")
  endif()
  add_executable(${name} ${arg_SOURCES} ${arg_ALONE} ${PROJECT_SOURCE_DIR}/tests/support/test_main.cpp)
  target_link_libraries(${name} PRIVATE mha_test_settings ${arg_LIBS})
  target_precompile_headers(${name} REUSE_FROM mha_test_pch)
  # What templates of Torch's headers cost a file in spite of that is paid once for four.
  set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
  set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

function(mha_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "EVERY_PATH;POISONED" "NEEDS" "SOURCES;ALONE;LIBS")
  mha_add_test_executable(${name} ${arg_UNPARSED_ARGUMENTS}
    SOURCES ${arg_SOURCES} $<TARGET_OBJECTS:mha_test_blas> ALONE ${arg_ALONE} LIBS ${arg_LIBS})
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
    get_property(sets GLOBAL PROPERTY mha_KERNEL_SETS)
    foreach(set IN LISTS sets)
      string(REPLACE "_" "-" set ${set})  # amx-emulated
      add_test(NAME ${name}.on_${set} COMMAND ${name} --gtest_brief=1 --on=${set})
      set_tests_properties(${name}.on_${set} PROPERTIES
        TIMEOUT 1200 ENVIRONMENT "${environment_again};MHA_CPU_ISA=${set}" SKIP_RETURN_CODE 77)
    endforeach()
    if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")  # memory errors are the kernels' to make
      add_test(NAME ${name}.on_plain COMMAND ${name} --gtest_brief=1)
      add_test(NAME ${name}.on_torch COMMAND ${name} --gtest_brief=1)
      add_test(NAME ${name}.on_reordered COMMAND ${name} --gtest_brief=1)
      set_tests_properties(${name}.on_plain PROPERTIES
        TIMEOUT 1200 ENVIRONMENT "${environment_again};MHA_PATH=plain")
      set_tests_properties(${name}.on_torch PROPERTIES
        TIMEOUT 1200 ENVIRONMENT "${environment_again};MHA_PATH=torch")
      # On the plain path all products are LibTorch's.
      set_tests_properties(${name}.on_reordered PROPERTIES
        TIMEOUT 1200 ENVIRONMENT "${environment_again};MHA_PATH=plain;MHA_TEST_BLAS=reordered")
    endif()
  endif()
endfunction()

# Torch's and GoogleTest's headers cost 15 seconds a file, so they are compiled once. A
# precompiled header fits only targets with the same options: all of them come from here.
add_library(mha_test_settings INTERFACE)
target_include_directories(mha_test_settings INTERFACE
  ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(mha_test_settings INTERFACE
  mha::mha mha::openmp mha_warnings GTest::gtest)

file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/mha_test_pch.cpp CONTENT "")
add_library(mha_test_pch OBJECT ${CMAKE_CURRENT_BINARY_DIR}/mha_test_pch.cpp)
target_link_libraries(mha_test_pch PRIVATE mha_test_settings)
target_precompile_headers(mha_test_pch PRIVATE <gtest/gtest.h> ${PROJECT_SOURCE_DIR}/tests/support/torch_headers.h)

# Stands in for LibTorch's BLAS where MHA_TEST_BLAS=reordered.
add_library(mha_test_blas OBJECT ${PROJECT_SOURCE_DIR}/tests/support/other_blas.cpp)
target_link_libraries(mha_test_blas PRIVATE mha_test_settings)
target_precompile_headers(mha_test_blas REUSE_FROM mha_test_pch)
