# The CPU kernels: plain C++ without any dependency on Python.
#
#   add_quant_gru_core(TARGET STATIC|OBJECT [TRAINING])
#
# TRAINING adds the kernels of the backward, those that requantize weights, and the search for scales.
# QUANT_GRU_INSTRUCTION_SETS selects instruction sets: "all", or a list such as "avx2;portable".
# The function sets QUANT_GRU_COMPILED_VARIANTS to the names of those that are in the build.

include(CheckCXXCompilerFlag)
find_package(Threads REQUIRED)

set(QUANT_GRU_INSTRUCTION_SETS all CACHE STRING "Instruction sets of the CPU kernels: all, or a list of names")
set(QUANT_GRU_SANITIZERS "" CACHE STRING "Sanitizers to compile everything with, such as address,undefined or thread")
set(QUANT_GRU_OPTIMIZATION -O3 CACHE STRING "How the CPU kernels are optimized; -O2 makes them a third as large")
set(QUANT_GRU_KERNELS ${CMAKE_CURRENT_LIST_DIR}/..)

# Sanitized kernels take a third of the time to compile if reports have lines only, if accesses are checked by calls, and if
# what AddressSanitizer finds at an access is not looked for twice: null pointers and the sizes of objects.
set(QUANT_GRU_SANITIZE_FLAGS "")
set(quant_gru_sanitize_kernels "")
if(QUANT_GRU_SANITIZERS)
  set(QUANT_GRU_SANITIZE_FLAGS -fsanitize=${QUANT_GRU_SANITIZERS} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1)
  add_link_options(-fsanitize=${QUANT_GRU_SANITIZERS})
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    set(quant_gru_sanitize_kernels "SHELL:--param asan-instrumentation-with-call-threshold=0" -fno-sanitize=null,object-size)
  endif()
endif()

# The arithmetic is exact only if the compiler rounds every operation as written.
set(QUANT_GRU_EXACT -fno-fast-math -ffp-contract=off -fno-math-errno -fno-trapping-math)

# The instruction sets of the processor that the build is for, fastest first, with their flags.
if(CMAKE_OSX_ARCHITECTURES)
  set(quant_gru_processor "${CMAKE_OSX_ARCHITECTURES}")
else()
  set(quant_gru_processor "${CMAKE_SYSTEM_PROCESSOR}")
endif()
set(QUANT_GRU_VARIANTS "")
if(quant_gru_processor MATCHES "^(x86_64|AMD64|amd64)$")
  set(QUANT_GRU_ARCHITECTURE QG_X86)
  set(QUANT_GRU_VARIANTS amx_int8 avx512_vbmi avx512_vnni avx_vnni avx2)
  set(quant_gru_flags_avx2 -mavx2 -mfma)
  set(quant_gru_flags_avx_vnni ${quant_gru_flags_avx2} -mavxvnni)
  set(quant_gru_flags_avx512_vnni ${quant_gru_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
                                  -mprefer-vector-width=512)
  set(quant_gru_flags_avx512_vbmi ${quant_gru_flags_avx512_vnni} -mavx512vbmi)
  set(quant_gru_flags_amx_int8 ${quant_gru_flags_avx512_vbmi} -mamx-tile -mamx-int8)
elseif(quant_gru_processor MATCHES "^(aarch64|arm64)$")
  set(QUANT_GRU_ARCHITECTURE QG_NEON_DOT)
  set(QUANT_GRU_VARIANTS neon_dot)
  set(quant_gru_flags_neon_dot -march=armv8.2-a+dotprod)
endif()
list(APPEND QUANT_GRU_VARIANTS portable)

function(add_quant_gru_core target kind)
  cmake_parse_arguments(PARSE_ARGV 2 arg TRAINING "" "")
  set(core boundary cell_numbers layer nan_rows pack_weights real_values stack tables tasks variants wide)
  list(TRANSFORM core PREPEND ${QUANT_GRU_KERNELS}/cpu/core/)
  if(arg_TRAINING)
    list(APPEND core ${QUANT_GRU_KERNELS}/cpu/training/backward ${QUANT_GRU_KERNELS}/cpu/training/stack_backward
         ${QUANT_GRU_KERNELS}/cpu/training/weights ${QUANT_GRU_KERNELS}/cpu/calibration/effects)
  endif()
  list(TRANSFORM core APPEND .cpp)
  add_library(${target} ${kind} ${core})
  target_include_directories(${target} PUBLIC ${QUANT_GRU_KERNELS} PRIVATE ${QUANT_GRU_KERNELS}/..)
  target_link_libraries(${target} PUBLIC Threads::Threads)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON)
  # -Wno-psabi: compiler vectors are never passed between files, so their calling convention does not matter.
  # Every build compiles these files with the same options, so that ccache compiles them once.
  target_compile_options(${target} PRIVATE ${QUANT_GRU_EXACT} ${QUANT_GRU_OPTIMIZATION} -Wno-psabi
                         -fno-stack-protector -ffunction-sections -fdata-sections ${QUANT_GRU_SANITIZE_FLAGS}
                         ${quant_gru_sanitize_kernels})
  target_compile_definitions(${target} PUBLIC ${QUANT_GRU_ARCHITECTURE} $<$<BOOL:${arg_TRAINING}>:QG_TRAINING>)

  # One file per instruction set. Only this file is compiled for it; variants.cpp selects a set at run time. A set whose
  # flags the compiler does not know is left out (GCC 10 has neither AVX-VNNI nor AMX). `quant-gru info` names it.
  set(left_out "")
  set(without "")
  set(compiled "")
  set(wanted ${QUANT_GRU_INSTRUCTION_SETS})
  foreach(name ${wanted})
    string(REPLACE "-" "_" each ${name})
    if(NOT name STREQUAL all AND NOT each IN_LIST QUANT_GRU_VARIANTS)
      string(REPLACE ";" ", " known "${QUANT_GRU_VARIANTS}")
      message(FATAL_ERROR "Expected QUANT_GRU_INSTRUCTION_SETS to be all, or some of ${known}, got ${name}")
    endif()
  endforeach()
  string(REPLACE "-" "_" wanted "${wanted}")
  foreach(name ${QUANT_GRU_VARIANTS})
    string(REPLACE "_" "-" text ${name})
    set(flags ${quant_gru_flags_${name}})
    string(JOIN " " joined ${flags})
    if(NOT "all" IN_LIST wanted AND NOT name IN_LIST wanted)
      list(APPEND without QG_WITHOUT_${name})
      continue()
    endif()
    if(flags)
      check_cxx_compiler_flag("${joined}" QG_COMPILES_${name})
      if(NOT QG_COMPILES_${name})
        message(STATUS "Leaving out ${text}: the compiler does not know all of ${joined}")
        list(APPEND without QG_WITHOUT_${name})
        list(APPEND left_out ${text})
        continue()
      endif()
    endif()
    list(APPEND compiled ${name})
    target_sources(${target} PRIVATE ${QUANT_GRU_KERNELS}/cpu/isa/${name}.cpp)
    set_source_files_properties(${QUANT_GRU_KERNELS}/cpu/isa/${name}.cpp PROPERTIES COMPILE_OPTIONS "${flags}")
  endforeach()
  # These differ only in the products and lanes of the fused kernel, so that the rest is compiled once.
  foreach(pair avx_vnni=avx2 avx512_vbmi=avx512_vnni amx_int8=avx512_vnni)
    string(REPLACE "=" ";" pair ${pair})
    list(GET pair 0 name)
    list(GET pair 1 like)
    if(name IN_LIST compiled AND like IN_LIST compiled)
      set_source_files_properties(${QUANT_GRU_KERNELS}/cpu/isa/${name}.cpp PROPERTIES COMPILE_DEFINITIONS QG_LIKE=${like})
    endif()
  endforeach()
  string(JOIN "," left_out ${left_out})
  set_property(SOURCE ${QUANT_GRU_KERNELS}/cpu/core/variants.cpp APPEND PROPERTY COMPILE_DEFINITIONS ${without}
               QG_LEFT_OUT="${left_out}")
  set(QUANT_GRU_COMPILED_VARIANTS ${compiled} PARENT_SCOPE)
endfunction()

# Compiles a library of files without hot loops, which use the kernels, for size. Under sanitizers -O0 takes a third of the
# time, and optimizes nothing away that one would find. As above, every build compiles them with the same options.
function(quant_gru_compile_small target)
  target_include_directories(${target} PRIVATE ${QUANT_GRU_CPP_INCLUDES})
  target_link_libraries(${target} PRIVATE quant_gru_core)
  set(optimization -Os)
  if(QUANT_GRU_SANITIZERS)
    set(optimization -O0)
  endif()
  target_compile_options(${target} PRIVATE ${QUANT_GRU_EXACT} ${optimization} -Wall -Wextra -ffunction-sections
                         -fdata-sections)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# Sets a variable to the instruction sets that sanitizers are for: those that this processor can run, if tiles are emulated.
# Those of avx512_vnni and avx2 cover most of the code of avx512_vbmi and avx_vnni.
function(quant_gru_sanitized_sets result)
  set(sets ${QUANT_GRU_VARIANTS})
  list(REMOVE_ITEM sets avx512_vbmi avx_vnni)
  if(EXISTS /proc/cpuinfo AND QUANT_GRU_ARCHITECTURE STREQUAL QG_X86)
    file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
    string(REPLACE " avx512vbmi " " avx512vbmi amx_int8 " flags "${flags} ")
    foreach(name avx2 avx512_vnni amx_int8)
      if(NOT flags MATCHES " ${name} ")
        list(REMOVE_ITEM sets ${name})
      endif()
    endforeach()
  endif()
  set(${result} ${sets} PARENT_SCOPE)
endfunction()

# Emulates the tiles of AMX, which a header `tiles` does, if only they are missing: the processor supports the other
# instructions of these kernels.
function(quant_gru_emulate_tiles tiles)
  file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
  if(NOT "${flags} " MATCHES " amx_int8 ")
    set_property(SOURCE ${QUANT_GRU_KERNELS}/cpu/isa/amx_int8.cpp APPEND PROPERTY COMPILE_OPTIONS -include ${tiles})
    set_property(SOURCE ${QUANT_GRU_KERNELS}/cpu/core/variants.cpp APPEND PROPERTY COMPILE_DEFINITIONS
                 QG_EMULATED_TILES)
  endif()
endfunction()
