# single_query_find_torch(): find_package(Torch) without what it does to the caller.
#
# It appends -gencode flags to CMAKE_CUDA_FLAGS and switches CMAKE_CUDA_ARCHITECTURES off; in a function's scope that
# ends with the function. Its imported targets (torch, c10_cuda) belong to the directory and stay.
function(single_query_find_torch)
  if(TARGET torch)
    return()
  endif()
  # Without a GPU it would ask for compute capability 5.0, which nvcc 13 refuses. No .cu file includes LibTorch.
  if(NOT DEFINED TORCH_CUDA_ARCH_LIST AND NOT DEFINED ENV{TORCH_CUDA_ARCH_LIST})
    set(TORCH_CUDA_ARCH_LIST 9.0)
  endif()
  find_package(Torch REQUIRED)
endfunction()
