# Included by kernel/CMakeLists.txt: sets `architectures`, what the kernels are compiled for.

# A parent that found LibTorch before has its -gencode flags in CMAKE_CUDA_FLAGS and CMAKE_CUDA_ARCHITECTURES off.
set(architectures ${CMAKE_CUDA_ARCHITECTURES})
if(NOT architectures AND TARGET torch::cudart)
  string(REGEX REPLACE "-gencode arch=[^ ]+" "" CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS}")
  set(architectures $CACHE{CMAKE_CUDA_ARCHITECTURES})
endif()
# The kernels need compute capability 8.0. A parent that chose nothing comes with nvcc's default, which may be less.
list(FILTER architectures EXCLUDE REGEX "^[5-7][0-9]")
if(NOT architectures)
  set(architectures ${single_query_architectures})
endif()
