# The package that find_package(mha) finds: headers, library, exported target mha::mha; and with
# COMPONENTS draw, mha::draw.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mha)

# What is installed finds LibTorch where the build found it. Named, since CMake leaves out what lies
# inside of this project, such as a virtual environment.
function(mha_install target)
  set_target_properties(${target} PROPERTIES
    INSTALL_RPATH ${mha_LIBTORCH_DIR}/lib
    INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS ${target} ${ARGN})
endfunction()

mha_install(mha EXPORT mhaTargets)
install(DIRECTORY include/mha TYPE INCLUDE PATTERN draw.h EXCLUDE)
install(EXPORT mhaTargets NAMESPACE mha:: DESTINATION ${package_dir})

if(TARGET mha_draw)
  mha_install(mha_draw EXPORT mhaDrawTargets)
  install(FILES include/mha/draw.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/mha)
  install(EXPORT mhaDrawTargets NAMESPACE mha:: DESTINATION ${package_dir})
endif()

configure_package_config_file(cmake/mhaConfig.cmake.in mhaConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break its callers.
write_basic_package_version_file(mhaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/mhaConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/mhaConfigVersion.cmake
  cmake/MhaLibTorch.cmake
  DESTINATION ${package_dir})

if(TARGET mha_cli)
  mha_install(mha_cli)
endif()
