# The host's side of the GPU: plain C++ without any dependency on Python or PyTorch.
#
#   add_quant_gru_plans(TARGET)
#   add_quant_gru_host(TARGET EMBEDDED)
#
# The plans are forms, tables, layouts, and the launches of calls whose memory and arrays others own. The rest of the host
# owns both, and starts the launches. EMBEDDED is the file with the texts of CUDA sources, see kernel_runtime/native/sources.hpp; whoever links the
# host defines what kernel_runtime/native/embedder.hpp declares. Both need the numbers of cells, which add_quant_gru_core
# compiles.

set(QUANT_GRU_HOST ${CMAKE_CURRENT_LIST_DIR})
set(QUANT_GRU_RUNTIME ${CMAKE_CURRENT_LIST_DIR}/../../../kernel_runtime/native)

function(add_quant_gru_plans target)
  set(plans backward_shapes cell_form gate_numbers gate_tables planner projection saturating)
  list(TRANSFORM plans PREPEND plans/)
  list(APPEND plans boundary derived_arrays fast_layers general_layers gru_backward launches layer_backward projections recurrences)
  list(TRANSFORM plans PREPEND ${QUANT_GRU_HOST}/)
  list(TRANSFORM plans APPEND .cpp)
  add_library(${target} OBJECT ${plans})
endfunction()

function(add_quant_gru_host target embedded)
  set(host call uploaded_cell)
  list(TRANSFORM host PREPEND ${QUANT_GRU_HOST}/)
  set(runtime compiler cubin_cache device driver embedded parallel_compiler sha256 shared_library)
  list(TRANSFORM runtime PREPEND ${QUANT_GRU_RUNTIME}/)
  set(sources ${host} ${runtime})
  list(TRANSFORM sources APPEND .cpp)
  add_library(${target} OBJECT ${embedded} ${sources})
endfunction()
