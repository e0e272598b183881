# Install and export. The tree is the same below any prefix: include/, lib/, lib/cmake/flash_kda/. In a wheel it lies
# inside the Python package (FLASH_KDA_INSTALL_SUBDIR), beside its __init__.py.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(SKBUILD)
  set(default_subdir flash_kda)
endif()
set(FLASH_KDA_INSTALL_SUBDIR "${default_subdir}"
    CACHE STRING "Folder below the install prefix that takes headers, library and CMake package")
if(FLASH_KDA_INSTALL_SUBDIR)
  # One layout for every platform: a wheel has no lib64 or lib/<triplet>.
  set(include_dir ${FLASH_KDA_INSTALL_SUBDIR}/include)
  set(lib_dir ${FLASH_KDA_INSTALL_SUBDIR}/lib)
else()
  set(include_dir ${CMAKE_INSTALL_INCLUDEDIR})
  set(lib_dir ${CMAKE_INSTALL_LIBDIR})
endif()
set(config_dir ${lib_dir}/cmake/flash_kda)

install(
  TARGETS flash_kda
  EXPORT flash_kdaTargets
  ARCHIVE DESTINATION ${lib_dir} COMPONENT cpp
  INCLUDES DESTINATION ${include_dir})
install(DIRECTORY include/flash_kda DESTINATION ${include_dir} COMPONENT cpp FILES_MATCHING PATTERN "*.h")
install(EXPORT flash_kdaTargets NAMESPACE flash_kda:: DESTINATION ${config_dir} COMPONENT cpp)

configure_package_config_file(cmake/flash_kdaConfig.cmake.in ${PROJECT_BINARY_DIR}/flash_kdaConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flash_kdaConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flash_kdaConfig.cmake ${PROJECT_BINARY_DIR}/flash_kdaConfigVersion.cmake
        DESTINATION ${config_dir} COMPONENT cpp)
