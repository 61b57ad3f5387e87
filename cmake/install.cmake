# What `cmake --install` installs: headers, libraries and a package for find_package(single_query CONFIG).

# single_query_install(<component>): the library single_query_<component>, as single_query::<component> in the package.
function(single_query_install component)
  if(NOT SINGLE_QUERY_INSTALL)
    return()
  endif()
  set_target_properties(single_query_${component} PROPERTIES EXPORT_NAME ${component})
  install(TARGETS single_query_${component} EXPORT single_query_${component} FILE_SET HEADERS)
  install(EXPORT single_query_${component} NAMESPACE single_query:: DESTINATION ${single_query_package_folder})
endfunction()

if(SINGLE_QUERY_INSTALL)
  include(GNUInstallDirs)
  include(CMakePackageConfigHelpers)
  set(single_query_package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/single_query)
  configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/single_queryConfig.cmake.in single_queryConfig.cmake
                                INSTALL_DESTINATION ${single_query_package_folder})
  # Before 1.0 a minor version may change the interface.
  write_basic_package_version_file(single_queryConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/single_queryConfig.cmake ${PROJECT_BINARY_DIR}/single_queryConfigVersion.cmake
                ${CMAKE_CURRENT_LIST_DIR}/find_torch.cmake
          DESTINATION ${single_query_package_folder})
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()
