# The operator of frozen GRUs for ONNX Runtime, a library by itself. It is built without a header of ONNX Runtime.
set(quant_gru_cpp ${CMAKE_CURRENT_LIST_DIR}/..)
# Where the files of the C++ library are, and those that it shares with the Python package.
set(QUANT_GRU_CPP_INCLUDES ${quant_gru_cpp}/include ${quant_gru_cpp}/src ${quant_gru_cpp}/../src
                           ${quant_gru_cpp}/../src/quant_gru)
# A frozen GRU: files, models, streams.
set(QUANT_GRU_FROZEN columns frozen_file json model network number_rules packed_file safetensors stream)
list(TRANSFORM QUANT_GRU_FROZEN PREPEND ${quant_gru_cpp}/src/)
list(TRANSFORM QUANT_GRU_FROZEN APPEND .cpp)
list(APPEND QUANT_GRU_FROZEN ${quant_gru_cpp}/../src/quant_gru/kernel_runtime/native/whole_files.cpp)

# add_quant_gru_onnxruntime(TARGET OBJECT..): the objects are a frozen GRU and, if nothing links them, the kernels.
function(add_quant_gru_onnxruntime target)
  add_library(${target} SHARED ${quant_gru_cpp}/src/onnxruntime_operator.cpp ${ARGN})
  target_include_directories(${target} PRIVATE ${QUANT_GRU_CPP_INCLUDES})
  target_compile_options(${target} PRIVATE ${QUANT_GRU_EXACT} -Os -Wall -Wextra -ffunction-sections -fdata-sections)
  target_link_libraries(${target} PRIVATE Threads::Threads)
  set_target_properties(${target} PROPERTIES OUTPUT_NAME gru_quant_onnxruntime CXX_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON)
  if(CMAKE_SYSTEM_NAME STREQUAL Linux)
    set(exported ${quant_gru_cpp}/cmake/onnxruntime_operator.map)
    target_link_options(${target} PRIVATE -Wl,--gc-sections -Wl,--version-script=${exported})
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${exported})
  endif()
endfunction()
