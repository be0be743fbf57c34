# The host's side of the GPU: plain C++ without any dependency on Python or PyTorch.
#
#   add_quant_gru_host(TARGET EMBEDDED)
#
# EMBEDDED is the file with the texts of CUDA sources, see kernel_runtime/native/sources.hpp. Whoever links the target
# defines what kernel_runtime/native/embedder.hpp declares.

set(QUANT_GRU_HOST ${CMAKE_CURRENT_LIST_DIR})

function(add_quant_gru_host target embedded)
  set(host call cell cell_form fast_layers gate_tables general_layers planner projections real_projections saturating
           stationary steps)
  list(TRANSFORM host PREPEND ${QUANT_GRU_HOST}/)
  set(runtime compiler cubin_cache device driver sha256 shared_library)
  list(TRANSFORM runtime PREPEND ${QUANT_GRU_HOST}/../../../../kernel_runtime/native/)
  set(sources ${host} ${runtime})
  list(TRANSFORM sources APPEND .cpp)
  add_library(${target} OBJECT ${embedded} ${sources})
endfunction()
