# Installs the C++ component, moves the tree, and configures, builds and runs examples/cpp against it.
# Arguments: build_dir, source_dir, work_dir, lib_dir, build_type, compiler, generator, flags.

set(prefix ${work_dir}/moved)
set(example ${work_dir}/example)
string(REPLACE ";" " " flags "${flags}")
file(REMOVE_RECURSE ${work_dir})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY COMMAND_ECHO STDOUT)
endfunction()

run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/installed --component cpp)
file(RENAME ${work_dir}/installed ${prefix})
run(${CMAKE_COMMAND} -S ${source_dir}/examples/cpp -B ${example} -G ${generator} -D CMAKE_BUILD_TYPE=${build_type}
    -D CMAKE_CXX_COMPILER=${compiler} -D "CMAKE_CXX_FLAGS=${flags}"
    -D flash_kda_DIR=${prefix}/${lib_dir}/cmake/flash_kda)
run(${CMAKE_COMMAND} --build ${example})

execute_process(COMMAND ${example}/forward_example OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
message(STATUS "${output}")
if(NOT output MATCHES "flash_kda forward on cpu" OR NOT output MATCHES "differ by at most 0\n")
  message(FATAL_ERROR "the example printed something else")
endif()
