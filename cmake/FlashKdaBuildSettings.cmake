# Settings that hold for every target: standard, visibility, warnings, sanitizers.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# The library is linked into shared objects (the Python module) that must not export it.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Applies our warnings to one of our targets (not to what it links).
function(flash_kda_warnings target)
  target_compile_options(
    ${target}
    PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Wall
            -Wextra
            -Wshadow
            -Wconversion
            -Wno-sign-conversion
            -Wnon-virtual-dtor
            -Woverloaded-virtual>)
  if(FLASH_KDA_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Werror>)
  endif()
endfunction()

if(FLASH_KDA_SANITIZE STREQUAL "address")
  set(sanitizer_flags -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(FLASH_KDA_SANITIZE STREQUAL "thread")
  set(sanitizer_flags -fsanitize=thread -fno-omit-frame-pointer)
elseif(FLASH_KDA_SANITIZE)
  message(FATAL_ERROR "FLASH_KDA_SANITIZE: expected address, thread or nothing, got ${FLASH_KDA_SANITIZE}")
endif()
if(FLASH_KDA_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${sanitizer_flags}>")
  add_link_options(${sanitizer_flags})
endif()
