# The CPU kernels: one body, compiled once for each instruction set with flags of its own.
#
# They are optimised in every build type, since unoptimised vector code is too slow to test. No
# option may change what a comparison with NaN gives.
set(kernel_options -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -DMHA_IS_KERNEL)

target_sources(mha PRIVATE src/cpu/kernels_generic.cpp)
set_source_files_properties(src/cpu/kernels_generic.cpp PROPERTIES
  COMPILE_OPTIONS "${kernel_options}" SKIP_UNITY_BUILD_INCLUSION ON)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(mha PRIVATE MHA_X86_KERNELS=1)
  target_sources(mha PRIVATE src/cpu/kernels_avx2.cpp src/cpu/kernels_avx512.cpp)
  set_source_files_properties(src/cpu/kernels_avx2.cpp PROPERTIES
    COMPILE_OPTIONS "${kernel_options};-mavx2;-mfma;-mf16c" SKIP_UNITY_BUILD_INCLUSION ON)
  set_source_files_properties(src/cpu/kernels_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "${kernel_options};-mavx512f;-mavx512vl;-mavx512dq;-mavx512bw;-mfma;-mprefer-vector-width=512"
    SKIP_UNITY_BUILD_INCLUSION ON)
endif()
