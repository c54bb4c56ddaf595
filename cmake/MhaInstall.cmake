# The package that find_package(mha) finds: headers, library, exported target mha::mha; and with
# COMPONENTS draw, mha::draw.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mha)

# The library, if shared, finds LibTorch where the build found it.
set_target_properties(mha PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS mha EXPORT mhaTargets)
install(DIRECTORY include/mha TYPE INCLUDE PATTERN draw.h EXCLUDE)
install(EXPORT mhaTargets NAMESPACE mha:: DESTINATION ${package_dir})

if(TARGET mha_draw)
  set_target_properties(mha_draw PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS mha_draw EXPORT mhaDrawTargets)
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
  set_target_properties(mha_cli PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS mha_cli)
endif()
