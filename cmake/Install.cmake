# What `cmake --install` leaves behind beside the tool: the library, its headers, find_package(annulus), pkg-config annulus;
# and where MPI was found the library of its ranks, find_package(annulus COMPONENTS mpi).
#
# A shared libannulus needs nothing from its users: Highway and threads are its own affair. A static one hands both on, so the
# CMake package then finds them and the .pc file then names them.
include(CMakePackageConfigHelpers)

set_target_properties(annulus PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
install(TARGETS annulus EXPORT annulusTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/annulus DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/annulus)
install(EXPORT annulusTargets NAMESPACE annulus:: DESTINATION ${package_dir})
if(TARGET annulus_mpi)
  set_target_properties(annulus_mpi PROPERTIES EXPORT_NAME mpi VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} INSTALL_RPATH $ORIGIN)
  install(TARGETS annulus_mpi EXPORT annulusMpiTargets)
  install(EXPORT annulusMpiTargets NAMESPACE annulus:: DESTINATION ${package_dir})
endif()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/annulusConfig.cmake.in ${PROJECT_BINARY_DIR}/annulusConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/annulusConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/annulusConfig.cmake ${PROJECT_BINARY_DIR}/annulusConfigVersion.cmake DESTINATION ${package_dir})

if(BUILD_SHARED_LIBS)
  set(pc_requires "")
  set(pc_libs "")
else()
  set(pc_requires "libhwy")
  set(pc_libs "-lstdc++ -lm -ldl -pthread") # a C program is linked by a C compiler
endif()
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/annulus.pc.in ${PROJECT_BINARY_DIR}/annulus.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/annulus.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
