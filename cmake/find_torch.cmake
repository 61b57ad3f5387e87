# How single_query finds LibTorch: in its own build, in an installed package and in provide_dependencies.cmake.
include_guard()

set(SINGLE_QUERY_TORCH_MINIMUM 2.7) # the first LibTorch whose packages all have the C++11 ABI

# single_query_torch_fault(<result> <library>): why the LibTorch with this libc10_cuda.so cannot be used; empty when it
# can. Two CUDA runtimes of different major version in a process would each see half of its state.
function(single_query_torch_fault result library)
  set(${result} "" PARENT_SCOPE)
  if(NOT EXISTS "${library}")
    set(${result} "it was built without CUDA" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS "${library}" runtime REGEX "^libcudart[^@]*[.]so[.][0-9]" LIMIT_COUNT 1)
  if(runtime MATCHES "[.]so[.]([0-9]+)" AND CUDAToolkit_VERSION_MAJOR
     AND NOT CMAKE_MATCH_1 EQUAL CUDAToolkit_VERSION_MAJOR)
    set(${result} "it is for CUDA ${CMAKE_MATCH_1}, the CUDA Toolkit is ${CUDAToolkit_VERSION}" PARENT_SCOPE)
  endif()
endfunction()

# single_query_find_torch(<fault>): the imported targets torch and c10_cuda in the calling directory; `fault` says why
# there are none, and is empty when there are.
#
# find_package(Torch) appends -gencode flags to CMAKE_CUDA_FLAGS and switches CMAKE_CUDA_ARCHITECTURES off. That ends
# with this function's scope; the targets stay.
function(single_query_find_torch fault)
  set(${fault} "" PARENT_SCOPE)
  if(NOT TARGET torch)
    # Without a GPU it would choose compute capability 5.0, which nvcc 13 refuses. Whatever it is, no .cu file of this
    # project includes LibTorch.
    if(NOT DEFINED TORCH_CUDA_ARCH_LIST AND NOT DEFINED ENV{TORCH_CUDA_ARCH_LIST})
      set(TORCH_CUDA_ARCH_LIST 9.0)
    endif()
    cmake_path(GET CUDAToolkit_BIN_DIR PARENT_PATH CUDA_TOOLKIT_ROOT_DIR) # ours, should there be several
    set(CMAKE_MESSAGE_LOG_LEVEL ERROR) # its warnings are about those flags, and about a profiler that is left out
    find_package(Torch ${SINGLE_QUERY_TORCH_MINIMUM} QUIET)
    unset(CMAKE_MESSAGE_LOG_LEVEL)
    if(NOT Torch_FOUND)
      string(REPLACE ";" ", " considered "${Torch_CONSIDERED_CONFIGS}")
      string(APPEND considered " ${Torch_CONSIDERED_VERSIONS}")
      string(CONCAT message "LibTorch ${SINGLE_QUERY_TORCH_MINIMUM} or later was not found. Give the one to use with "
                            "-DTorch_DIR=<libtorch>/share/cmake/Torch or -DCMAKE_PREFIX_PATH=<libtorch>.")
      if(Torch_CONSIDERED_CONFIGS)
        string(APPEND message " Not suitable: ${considered}.")
      endif()
      set(${fault} "${message}" PARENT_SCOPE)
      return()
    endif()
    message(STATUS "Found LibTorch ${Torch_VERSION}: ${Torch_DIR}")
  endif()

  set(library "")
  if(TARGET c10_cuda)
    get_target_property(library c10_cuda IMPORTED_LOCATION_RELEASE)
  endif()
  single_query_torch_fault(reason "${library}")
  if(reason)
    set(${fault} "The LibTorch in ${Torch_DIR} cannot be used: ${reason}." PARENT_SCOPE)
  endif()
endfunction()
