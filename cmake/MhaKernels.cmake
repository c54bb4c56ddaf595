# mha_add_kernels(<set> [<flag>...])
#
# The kernels of one instruction set, src/cpu/kernels_<set>.cpp, with flags of their own. The tests
# run on each set of the global property mha_KERNEL_SETS.
#
# They are optimised in every build type, since unoptimised vector code is too slow to test; under
# sanitizers less, since their checks take the time there and a third of it to compile. No option may
# change what a comparison with NaN gives.
function(mha_add_kernels set)
  set(file src/cpu/kernels_${set}.cpp)
  set(optimise -O3)
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
    set(optimise -O1)
  endif()
  target_sources(mha PRIVATE ${file})
  set_source_files_properties(${file} PROPERTIES
    COMPILE_OPTIONS
      "${optimise};-ffp-contract=fast;-fno-math-errno;-fno-trapping-math;-DMHA_IS_KERNEL;${ARGN}"
    SKIP_UNITY_BUILD_INCLUSION ON)
  set_property(GLOBAL APPEND PROPERTY mha_KERNEL_SETS ${set})
endfunction()

mha_add_kernels(generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(mha PRIVATE MHA_X86_KERNELS=1)
  mha_add_kernels(avx2 -mavx2 -mfma -mf16c)
  set(avx512 -mavx512f -mavx512vl -mavx512dq -mavx512bw -mfma -mprefer-vector-width=512)
  mha_add_kernels(avx512 ${avx512})
  # They take a part of the headers that all sets share. g++ 12 warns of what its own intrinsics
  # leave undefined on purpose.
  set(tiles ${avx512} -Wno-unused-function -Wno-uninitialized -Wno-maybe-uninitialized)
  mha_add_kernels(amx ${tiles})
  if(MHA_BUILD_TESTS)
    target_compile_definitions(mha PRIVATE MHA_EMULATED_TILES=1)
    mha_add_kernels(amx_emulated ${tiles})
  endif()
endif()
