# GPUs: the driver and NVRTC are opened at run time. The sources of kernels are embedded in the library.
if(NOT QUANT_GRU_CUDA)
  return()
endif()
set(folder ${CMAKE_CURRENT_SOURCE_DIR}/../src)
set(lines "")
set(texts "")
# Adds texts: files that match a pattern of a folder. A name is a prefix, then the path below the folder.
function(quant_gru_embed prefix root)
  foreach(pattern IN LISTS ARGN)
    file(GLOB_RECURSE found RELATIVE ${root} CONFIGURE_DEPENDS ${root}/${pattern})
    foreach(path IN LISTS found)
      list(APPEND lines "${prefix}${path}|${root}/${path}")
      list(APPEND texts ${root}/${path})
    endforeach()
  endforeach()
  set(lines ${lines} PARENT_SCOPE)
  set(texts ${texts} PARENT_SCOPE)
endfunction()
quant_gru_embed("" ${folder}/quant_gru/kernels/cuda *.cuh boundary/quantize_input.cu
                boundary/requantize_layers.cu boundary/rows.cu boundary/wide_border.cu projection/byte_product.cu
                projection/codes_tiled.cu projection/codes_weight_stationary.cu projection/int_mm.cu
                projection/reals_few_rows.cu projection/reals_tiled.cu projection/reals_wgmma.cu
                recurrence/persistent.cu recurrence/per_step.cu recurrence/wide_integers.cu)
quant_gru_embed("" ${folder}/quant_gru/kernels c99/*.h)
quant_gru_embed("kernel_runtime/cuda/" ${folder}/quant_gru/kernel_runtime/cuda *.cuh)
quant_gru_embed("" ${folder}/quant_gru/kernel_runtime/cuda *.cu stdint.h)
quant_gru_embed("kernel_runtime/c99/" ${folder}/quant_gru/kernel_runtime/c99 *.h)
# Headers are parts of all keys in the cache. Those of the passes become a part of their sources instead.
function(quant_gru_join name)
  set(joined "")
  foreach(part IN LISTS ARGN)
    file(READ ${CMAKE_CURRENT_SOURCE_DIR}/src/passes/${part} text)
    string(REGEX REPLACE "#(pragma once|include \"passes/[a-z_]+.hpp\")" "" text "${text}")
    string(APPEND joined "${text}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS src/passes/${part})
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/kernels/passes/${name} CONTENT "${joined}" @ONLY)
endfunction()
if(QUANT_GRU_CALIBRATION)
  quant_gru_join(units.cu equations.hpp units.hpp units.cu)
  quant_gru_join(code_conversions.cu code_conversions.hpp code_conversions.cu)
  quant_gru_embed("" ${CMAKE_CURRENT_BINARY_DIR}/kernels *.cu)
  quant_gru_embed("" ${folder}/quant_gru/kernels/cuda backward/local_derivatives.cu
                  backward/local_derivatives_bytes.cu backward/operands.cu backward/projection_gradients.cu
                  backward/recurrence.cu backward/recurrence_step.cu)
endif()
list(JOIN lines "\n" text)
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/cuda_sources.txt CONTENT "${text}\n" @ONLY)
set(embedded ${CMAKE_CURRENT_BINARY_DIR}/cuda_sources.cpp)
add_custom_command(
  OUTPUT ${embedded}
  COMMAND ${CMAKE_COMMAND} -DOUTPUT=${embedded} -DLIST=${CMAKE_CURRENT_BINARY_DIR}/cuda_sources.txt
          -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_sources.cmake
  DEPENDS ${texts} ${CMAKE_CURRENT_BINARY_DIR}/cuda_sources.txt cmake/embed_sources.cmake)
include(${folder}/quant_gru/kernels/cuda/host/host.cmake)
add_quant_gru_plans(quant_gru_gpu_plans)
add_quant_gru_host(quant_gru_cuda ${embedded})
target_sources(quant_gru_cuda PRIVATE src/gpu_embedder.cpp src/model_on_gpu.cpp)
list(APPEND parts quant_gru_gpu_plans quant_gru_cuda)
