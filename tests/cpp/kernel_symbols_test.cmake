# The CPU kernels' objects share no inline function with the rest of the program. A weak symbol in an object that was
# compiled for AVX-512 could be the copy that the linker keeps for everybody, and end the program on a lesser machine.
# Arguments: library, nm.

execute_process(COMMAND ${nm} ${library} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" symbols "${symbols}")
set(object "")
set(kernels 0)
foreach(line IN LISTS symbols)
  if(line MATCHES "^([^ ]+):$")
    set(object ${CMAKE_MATCH_1})
    if(object MATCHES "^kernels_")
      math(EXPR kernels "${kernels} + 1")
    endif()
  elseif(object MATCHES "^kernels_" AND line MATCHES " [uvwVW] " AND NOT line MATCHES " DW\\.ref\\.")
    message(SEND_ERROR "${object} has a symbol that others may share: ${line}")
  endif()
endforeach()
if(kernels EQUAL 0)
  message(FATAL_ERROR "no kernels_*.o in ${library}")
endif()
message(STATUS "${kernels} objects looked at")
