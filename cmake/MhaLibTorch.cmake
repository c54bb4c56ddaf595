# Finds LibTorch, for the build and (installed beside mhaConfig.cmake) for the package alike.
#
# Defines the targets
#   mha::libtorch  headers, libraries and the C++ standard that the found LibTorch asks for
#   mha::openmp    what makes at::parallel_for run in parallel, on LibTorch's own OpenMP runtime
# and sets mha_LIBTORCH_VERSION, mha_LIBTORCH_DIR and mha_LIBTORCH_HOW. Without a usable LibTorch
# the targets are absent and mha_LIBTORCH_PROBLEM is a sentence.
#
# Reads what find_package(Torch) reads (Torch_DIR, CMAKE_PREFIX_PATH), then mha_LIBTORCH_HINTS.
# MHA_TORCH_BY_PATH=ON takes the way that builds with an accelerator always take; see below.

function(mha_find_libtorch)
  foreach(result PROBLEM VERSION DIR HOW)
    unset(mha_LIBTORCH_${result} PARENT_SCOPE)
  endforeach()

  if(TARGET torch AND TARGET torch_library)
    set(how "the targets of the surrounding project")
    set(libraries torch torch_library)
    get_target_property(include_dirs torch INTERFACE_INCLUDE_DIRECTORIES)
    list(GET include_dirs 0 root)
    get_filename_component(root "${root}" DIRECTORY)
  else()
    # The search of find_package(Torch) without the run of TorchConfig.cmake.
    find_package(Torch QUIET CONFIG CONFIGS TorchConfigVersion.cmake HINTS ${mha_LIBTORCH_HINTS})
    if(NOT Torch_FOUND)
      set(mha_LIBTORCH_PROBLEM "LibTorch was not found: set Torch_DIR or CMAKE_PREFIX_PATH, \
for a Python that has torch to the output of \
python3 -c 'import torch; print(torch.utils.cmake_prefix_path)'" PARENT_SCOPE)
      return()
    endif()
    get_filename_component(root "${Torch_DIR}/../../.." ABSOLUTE)

    # For a build with an accelerator TorchConfig.cmake demands that accelerator's whole toolkit,
    # and ends the configure step without it. mha compiles no device code and needs none of it.
    file(GLOB accelerators "${root}/lib/libtorch_cuda.so" "${root}/lib/libtorch_hip.so"
                           "${root}/lib/libtorch_xpu.so")
    if(accelerators OR MHA_TORCH_BY_PATH)
      set(how "libraries by path")
      set(include_dirs "${root}/include" "${root}/include/torch/csrc/api/include")
      # No symbol of libtorch.so is used, but it brings the accelerator's kernels along.
      set(libraries "-Wl,--push-state,--no-as-needed,${root}/lib/libtorch.so,--pop-state"
                    "${root}/lib/libtorch_cpu.so" "${root}/lib/libc10.so")
      # Wheels before 2.6 use the old string ABI, and only this file says so.
      file(STRINGS "${Torch_DIR}/TorchConfig.cmake" abi REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
      string(REGEX MATCH "_GLIBCXX_USE_CXX11_ABI=[01]" definitions "${abi}")
    else()
      set(how "find_package(Torch)")
      find_package(Torch REQUIRED CONFIG)
      set(include_dirs "${TORCH_INCLUDE_DIRS}")
      set(libraries "${TORCH_LIBRARIES}")
    endif()
  endif()

  find_file(version_header NAMES torch/headeronly/version.h torch/version.h
            PATHS ${include_dirs} NO_DEFAULT_PATH NO_CACHE)
  if(NOT version_header)
    set(mha_LIBTORCH_PROBLEM "LibTorch in ${root} has no version.h in ${include_dirs}" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS "${version_header}" version REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^;0-9]+" "" version "${version}")
  string(REPLACE ";" "." version "${version}")
  if(version VERSION_LESS 2.14)
    set(standard cxx_std_17)
  else()
    set(standard cxx_std_20)
  endif()

  # Visible as far as the targets that it names.
  set(scope)
  if(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    set(scope GLOBAL)
  endif()

  if(NOT TARGET mha::libtorch)
    add_library(mha::libtorch INTERFACE IMPORTED ${scope})
    target_include_directories(mha::libtorch SYSTEM INTERFACE ${include_dirs})
    target_compile_definitions(mha::libtorch INTERFACE ${definitions})
    target_compile_features(mha::libtorch INTERFACE ${standard})
    target_link_libraries(mha::libtorch INTERFACE ${libraries})
  endif()

  # Two OpenMP runtimes in one process fight over the cores, so link the one that LibTorch brings,
  # under whatever name. That is GCC's; code that Clang makes would need a second, so it runs mha's
  # own loops (not ATen's) on one thread instead. So does code under the thread sanitizer, which
  # sees no fork and no join in GCC's runtime and would report every loop.
  if(NOT TARGET mha::openmp)
    add_library(mha::openmp INTERFACE IMPORTED ${scope})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")
      file(GLOB runtime "${root}/lib/libgomp*.so*")
      list(LENGTH runtime count)
      if(count EQUAL 1)
        target_compile_options(mha::openmp INTERFACE -fopenmp)
        target_link_libraries(mha::openmp INTERFACE "${runtime}")
      else()
        find_package(OpenMP REQUIRED COMPONENTS CXX)
        target_link_libraries(mha::openmp INTERFACE OpenMP::OpenMP_CXX)
      endif()
    endif()
  endif()

  set(mha_LIBTORCH_VERSION "${version}" PARENT_SCOPE)
  set(mha_LIBTORCH_DIR "${root}" PARENT_SCOPE)
  set(mha_LIBTORCH_HOW "${how}" PARENT_SCOPE)
endfunction()

mha_find_libtorch()
