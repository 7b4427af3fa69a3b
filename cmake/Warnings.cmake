# Every target of ours is clean under these, and stays so: warnings are errors.
add_library(annulus_warnings INTERFACE)
target_compile_options(annulus_warnings INTERFACE -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(annulus_warnings INTERFACE -Wno-restrict) # false alarm about "text" + std::string, GCC bug 105651
endif()
