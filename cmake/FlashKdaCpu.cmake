# The CPU backend: one numerical source, compiled once for each instruction set by a thin kernels_<isa>.cpp.
# Only these objects get instruction flags; the choice among them is made at run time.

file(GLOB cpu_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cpu/*.cpp)
set(avx2_source ${CMAKE_CURRENT_SOURCE_DIR}/src/cpu/kernels_avx2.cpp)
set(avx512_source ${CMAKE_CURRENT_SOURCE_DIR}/src/cpu/kernels_avx512.cpp)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(${avx2_source} PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  set_source_files_properties(
    ${avx512_source}
    PROPERTIES COMPILE_OPTIONS
               "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx2;-mfma;-mf16c;-mprefer-vector-width=512")
else()
  list(REMOVE_ITEM cpu_sources ${avx2_source} ${avx512_source})
endif()

target_sources(flash_kda PRIVATE ${cpu_sources})
