# CMAKE_PROJECT_INCLUDE of builds for Arm and with sanitizers: most of the time would go into the headers of
# the standard library. That each file includes what it needs, the builds for this machine show.
set(precompiled <algorithm> <array> <cmath> <cstdint> <cstring> <functional> <map> <memory> <mutex> <optional> <stdexcept>
                <string> <thread> <utility> <vector>)
set(clashing calibration/search calibration/windows parameters/float_gru parameters/operator_rules parameters/read
             passes/code_on_device passes/cublas passes/on_device passes/pointers plan/spline plan/tables)

function(quant_gru_precompile)
  # files with options of their own cannot read it
  file(GLOB alone ${QUANT_GRU_KERNELS}/cpu/isa/*.cpp)
  set_source_files_properties(${alone} src/passes/backward.cpp src/passes/forward.cpp src/passes/gemm.cpp PROPERTIES
                              SKIP_PRECOMPILE_HEADERS ON)
  if(CMAKE_CROSSCOMPILING)  # otherwise ccache may have these kernels
    target_precompile_headers(quant_gru_core PRIVATE ${precompiled})
  endif()
  target_precompile_headers(quant_gru_objects PRIVATE ${precompiled})
  if(TARGET quant_gru_calibration)
    # one unit, but for files whose names clash
    list(TRANSFORM clashing PREPEND src/)
    list(TRANSFORM clashing APPEND .cpp)
    set_source_files_properties(${clashing} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_target_properties(quant_gru_calibration PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
  foreach(target quant_gru_calibration quant_gru_gpu_plans quant_gru_cuda)
    if(TARGET ${target})
      target_precompile_headers(${target} REUSE_FROM quant_gru_objects)
    endif()
  endforeach()
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL quant_gru_precompile)
