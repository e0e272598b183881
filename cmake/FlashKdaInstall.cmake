# Install and export. The tree is the same below any prefix: include/, lib/, lib/cmake/flash_kda/. Inside the
# Python package the prefix is the package's own folder (scikit-build-core's wheel.install-dir).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)  # a wheel has no lib64 or lib/<triplet>
  set(CMAKE_INSTALL_INCLUDEDIR include)
endif()
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flash_kda)

install(
  TARGETS flash_kda
  EXPORT flash_kdaTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/flash_kda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp
        FILES_MATCHING PATTERN "*.h")
install(EXPORT flash_kdaTargets NAMESPACE flash_kda:: DESTINATION ${config_dir} COMPONENT cpp)

configure_package_config_file(cmake/flash_kdaConfig.cmake.in ${PROJECT_BINARY_DIR}/flash_kdaConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flash_kdaConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flash_kdaConfig.cmake ${PROJECT_BINARY_DIR}/flash_kdaConfigVersion.cmake
        DESTINATION ${config_dir} COMPONENT cpp)
