# Finds the CUTLASS headers that the CUDA kernels use: FLASH_KDA_CUTLASS_INCLUDE. They come from FLASH_KDA_CUTLASS_DIR,
# from an installed nvidia-cutlass package, or from the system; they are never part of this tree.

set(FLASH_KDA_CUTLASS_DIR "" CACHE PATH "Folder that holds cute/ and cutlass/ (CUTLASS 4.x, include/)")

set(cutlass_hints ${FLASH_KDA_CUTLASS_DIR} ${FLASH_KDA_CUTLASS_DIR}/include)
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_Interpreter_FOUND)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util as u; s = u.find_spec('cutlass_library'); print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE cutlass_library
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(cutlass_library)
    list(APPEND cutlass_hints ${cutlass_library}/source/include)
  endif()
endif()
find_path(FLASH_KDA_CUTLASS_INCLUDE cute/arch/mma_sm90_gmma.hpp HINTS ${cutlass_hints})
