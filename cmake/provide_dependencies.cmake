# A dependency provider: supplies LibTorch and Catch2 where find_package would not find them, so that a fresh clone
# builds. The presets name it in CMAKE_PROJECT_TOP_LEVEL_INCLUDES. Without that, and in a project that embeds this one,
# nothing is ever downloaded.
#
# LibTorch is the first of: what Torch_DIR, CMAKE_PREFIX_PATH or the system has; the torch package of the active
# python3; what was fetched before; pinned wheels from PyPI (torch-requirements.txt).
# Catch2 is the first of: the installed one; the distribution's package, unpacked but not installed; a pinned commit.
#
# What is fetched goes to $XDG_CACHE_HOME/single_query, or ~/.cache/single_query.
option(SINGLE_QUERY_PROVIDE_DEPENDENCIES "Fetch LibTorch and Catch2 where they are missing" ON)
if(NOT SINGLE_QUERY_PROVIDE_DEPENDENCIES)
  return()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/find_torch.cmake)
set(single_query_torch_requirements ${CMAKE_CURRENT_LIST_DIR}/torch-requirements.txt)
file(STRINGS ${single_query_torch_requirements} single_query_pins REGEX "^(torch|nvidia-cuda-runtime)==")
string(REGEX REPLACE "^torch==([0-9.]+).*;nvidia-cuda-runtime==([0-9]+).*" "\\1 for CUDA \\2"
                     single_query_torch_fetched "${single_query_pins}")

# Catch2 v3.8.1
set(single_query_catch2_repository https://github.com/catchorg/Catch2.git)
set(single_query_catch2_commit 2b60af89e23d28eefc081bc930831ee9d45ea58b)

# ---- The cache

# single_query_cached(<folder> <fault> <name> <fill>): the folder `name` of the cache. Where there is none, the function
# fill(<staging> <fault>) fills a staging folder, which is renamed when it is whole: half a folder is never taken for
# one. `folder` is empty when that failed, and `fault` says why.
function(single_query_cached folder fault name fill)
  set(cache "$ENV{XDG_CACHE_HOME}")
  if(NOT IS_ABSOLUTE "${cache}")
    set(cache "$ENV{HOME}/.cache")
  endif()
  set(path ${cache}/single_query/${name})
  set(${folder} ${path} PARENT_SCOPE)
  if(EXISTS ${path})
    return()
  endif()

  # The lock saves a concurrent run its download; where a file system has none, the staging name keeps runs apart.
  file(LOCK ${path}.lock GUARD FUNCTION TIMEOUT 0 RESULT_VARIABLE locked)
  if(NOT locked EQUAL 0)
    message(NOTICE "Waiting for another run that is filling ${path}")
    file(LOCK ${path}.lock GUARD FUNCTION TIMEOUT 3600 RESULT_VARIABLE locked)
  endif()
  if(EXISTS ${path})
    return()
  endif()
  file(GLOB interrupted ${path}.partial-*)
  if(locked EQUAL 0 AND interrupted)
    file(REMOVE_RECURSE ${interrupted})
  endif()

  string(RANDOM LENGTH 8 suffix)
  set(staging ${path}.partial-${suffix})
  file(MAKE_DIRECTORY ${staging})
  cmake_language(CALL ${fill} ${staging} reason)
  if(NOT reason)
    file(RENAME ${staging} ${path} RESULT status)
    if(NOT status EQUAL 0 AND NOT EXISTS ${path})
      set(reason "${path} could not be made: ${status}.")
    endif()
  endif()
  file(REMOVE_RECURSE ${staging})
  if(reason)
    set(${folder} "" PARENT_SCOPE)
    set(${fault} "${reason}" PARENT_SCOPE)
  endif()
endfunction()

# ---- LibTorch

function(single_query_torch_is_missing reason)
  message(FATAL_ERROR
    "LibTorch is missing: ${reason}\n"
    "Supply it in one of two ways:\n"
    "  - your own, ${SINGLE_QUERY_TORCH_MINIMUM} or later, built for the CUDA Toolkit's major version: "
    "-DTorch_DIR=<libtorch>/share/cmake/Torch, or pip install torch for the python3 in PATH;\n"
    "  - a copy of ~/.cache/single_query (or $XDG_CACHE_HOME/single_query) from a machine that could fetch it.")
endfunction()

# single_query_python_torch(<directory> <python>): the TorchConfig directory of python's torch package, which is located
# and not imported; empty when there is none, or none that can be used.
function(single_query_python_torch directory python)
  set(${directory} "" PARENT_SCOPE)
  set(locate "import importlib.util as u; s = u.find_spec('torch'); print(*(s and s.submodule_search_locations or []))")
  execute_process(COMMAND ${python} -c "${locate}" WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR}
                  OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(config ${package}/share/cmake/Torch)
  if(NOT package OR NOT EXISTS ${config}/TorchConfig.cmake)
    return()
  endif()
  set(version 0)
  if(EXISTS ${config}/TorchConfigVersion.cmake)
    file(STRINGS ${config}/TorchConfigVersion.cmake version REGEX "set.PACKAGE_VERSION " LIMIT_COUNT 1)
    string(REGEX REPLACE ".*\"([0-9.]+).*" "\\1" version "${version}")
  endif()
  single_query_torch_fault(fault ${package}/lib/libc10_cuda.so)
  if(version VERSION_LESS SINGLE_QUERY_TORCH_MINIMUM)
    set(fault "its version is ${version}, and ${SINGLE_QUERY_TORCH_MINIMUM} is needed")
  endif()
  if(fault)
    message(STATUS "Not used, the torch package of python3: ${fault} (${package})")
    return()
  endif()
  set(${directory} ${config} PARENT_SCOPE)
endfunction()

# Fills `staging` with the wheels of torch-requirements.txt.
function(single_query_fetch_torch staging fault)
  execute_process(COMMAND ${single_query_python} -m pip --version OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(${fault} "fetching it needs pip, which ${single_query_python} does not have." PARENT_SCOPE)
    return()
  endif()
  string(REGEX REPLACE "[.]partial-.*" "" place ${staging})
  message(NOTICE
    "Fetching LibTorch ${single_query_torch_fetched} and the CUDA libraries it loads from PyPI: 2.3 GB to download, "
    "3.7 GB on disk, once, in ${place}")

  # A Python for which there is no wheel takes another's: only the C++ part is used.
  execute_process(COMMAND ${single_query_python} -c "import sys; print(sys.implementation.name, sys.version_info[1])"
                  OUTPUT_VARIABLE python_version OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(foreign "")
  if(NOT python_version MATCHES "^cpython 1[0-4]$")
    set(foreign --implementation cp --python-version 3.12 --abi cp312 --platform manylinux_2_28_x86_64
                --platform manylinux_2_27_x86_64 --platform manylinux_2_25_x86_64 --platform manylinux_2_18_x86_64
                --platform manylinux2014_x86_64)
  endif()
  # pip unpacks in TMPDIR, which may be small, and moves from there: so it is in the cache too.
  file(MAKE_DIRECTORY ${staging}/tmp)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env TMPDIR=${staging}/tmp PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0
                          PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
                          ${single_query_python} -m pip install --target ${staging} ${foreign} --only-binary=:all:
                          --no-deps --no-cache-dir --no-compile --require-hashes -r ${single_query_torch_requirements}
                  RESULT_VARIABLE status)
  file(REMOVE_RECURSE ${staging}/tmp)
  if(NOT status EQUAL 0)
    set(${fault} "pip could not fetch it (its own messages are above)." PARENT_SCOPE)
  endif()
endfunction()

# Sets Torch_DIR. given: what it was set to when find_package did not accept it.
function(single_query_supply_torch given)
  unset(CMAKE_MESSAGE_LOG_LEVEL)
  if(given AND NOT given STREQUAL single_query_supplied_torch)
    message(FATAL_ERROR "Torch_DIR is ${given}: it must hold the TorchConfig.cmake of a LibTorch of version "
                        "${SINGLE_QUERY_TORCH_MINIMUM} or later.")
  endif()
  find_program(single_query_python python3 NO_CACHE)
  set(directory "")
  if(single_query_python)
    single_query_python_torch(directory ${single_query_python})
  endif()
  if(NOT directory)
    if(CUDAToolkit_VERSION AND NOT single_query_torch_fetched MATCHES "CUDA ${CUDAToolkit_VERSION_MAJOR}$")
      single_query_torch_is_missing("what would be fetched is ${single_query_torch_fetched}, and the CUDA Toolkit is \
${CUDAToolkit_VERSION}.")
    elseif(NOT "${CMAKE_HOST_SYSTEM_NAME} ${CMAKE_HOST_SYSTEM_PROCESSOR}" STREQUAL "Linux x86_64")
      single_query_torch_is_missing("it can be fetched for Linux on x86_64 only.")
    elseif(NOT single_query_python)
      single_query_torch_is_missing("fetching it needs Python 3 with pip, and there is no python3 in PATH.")
    endif()
    string(REPLACE " for CUDA " "-cu" name "libtorch-${single_query_torch_fetched}")
    single_query_cached(folder fault ${name} single_query_fetch_torch)
    if(NOT folder)
      single_query_torch_is_missing("${fault}")
    endif()
    set(directory ${folder}/torch/share/cmake/Torch)
  endif()
  set(Torch_DIR ${directory} CACHE PATH "The folder of TorchConfig.cmake" FORCE)
  set(single_query_supplied_torch ${directory} CACHE INTERNAL "Torch_DIR where it is not the user's choice")
endfunction()

# ---- Catch2

# Fills `staging` with the distribution's package, by apt and dpkg; needs no root.
function(single_query_unpack_catch2 staging fault)
  find_program(apt_get apt-get NO_CACHE)
  find_program(dpkg dpkg NO_CACHE)
  if(NOT apt_get OR NOT dpkg)
    set(${fault} "no apt-get" PARENT_SCOPE)
    return()
  endif()
  # A fresh machine has no package lists: then once more with lists of our own.
  set(own_lists -o Dir::State::Lists=${staging}/lists -o Dir::Cache=${staging}/cache)
  foreach(options "" "${own_lists}")
    if(options)
      message(STATUS "Reading the distribution's package lists")
      file(MAKE_DIRECTORY ${staging}/lists/partial ${staging}/cache/archives/partial)
      execute_process(COMMAND ${apt_get} ${options} update OUTPUT_QUIET ERROR_QUIET)
    endif()
    foreach(package libcatch2-dev catch2) # v3, and v2 before Debian 13
      execute_process(COMMAND ${apt_get} ${options} download ${package} WORKING_DIRECTORY ${staging}
                      OUTPUT_QUIET ERROR_QUIET)
      file(GLOB archive ${staging}/${package}_*.deb)
      if(archive)
        execute_process(COMMAND ${dpkg} -x ${archive} ${staging} OUTPUT_QUIET ERROR_QUIET)
        file(REMOVE_RECURSE ${archive} ${staging}/lists ${staging}/cache)
        return()
      endif()
    endforeach()
  endforeach()
  set(${fault} "no package" PARENT_SCOPE)
endfunction()

# Fills `staging` with the pinned commit.
function(single_query_clone_catch2 staging fault)
  find_program(git git NO_CACHE)
  if(NOT git)
    set(${fault} "git is missing" PARENT_SCOPE)
    return()
  endif()
  message(NOTICE "Fetching Catch2 from ${single_query_catch2_repository}, commit ${single_query_catch2_commit}")
  foreach(command "init --quiet"
                  "fetch --quiet --depth 1 ${single_query_catch2_repository} ${single_query_catch2_commit}"
                  "checkout --quiet ${single_query_catch2_commit}")
    separate_arguments(command)
    execute_process(COMMAND ${git} ${command} WORKING_DIRECTORY ${staging} RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      set(${fault} "git could not fetch it (its own messages are above)" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# Sets Catch2_DIR, or adds the targets and sets Catch2_FOUND.
function(single_query_supply_catch2)
  cmake_host_system_information(RESULT system QUERY DISTRIB_ID DISTRIB_VERSION_ID)
  list(JOIN system - system)
  single_query_cached(folder fault catch2-${system} single_query_unpack_catch2)
  file(GLOB config ${folder}/usr/lib/cmake/Catch2 ${folder}/usr/lib/*/cmake/Catch2)
  if(folder AND config)
    message(STATUS "Catch2: the distribution's package, unpacked in ${folder}")
    set(Catch2_DIR ${config} CACHE PATH "The folder of Catch2Config.cmake" FORCE)
    return()
  endif()

  single_query_cached(folder fault catch2-${single_query_catch2_commit} single_query_clone_catch2)
  if(NOT folder)
    message(FATAL_ERROR
      "Catch2, which the tests need, is missing: ${fault}\n"
      "Supply it in one of two ways:\n"
      "  - install it (v2.13 or later), or give -DCatch2_DIR=<folder of Catch2Config.cmake>;\n"
      "  - a copy of ~/.cache/single_query (or $XDG_CACHE_HOME/single_query) from a machine that could fetch it.\n"
      "Or build without the tests: -DSINGLE_QUERY_BUILD_TESTS=OFF.")
  endif()
  include(FetchContent)
  FetchContent_Declare(Catch2 SOURCE_DIR ${folder})
  FetchContent_MakeAvailable(Catch2)
  set(Catch2_FOUND TRUE PARENT_SCOPE)
endfunction()

# ---- The provider

# A macro, so that what find_package sets reaches its caller. It only fulfils a request or prepares it by <package>_DIR;
# then, and for every other package, find_package goes on as without a provider.
macro(single_query_provide_dependency method package)
  if("${package}" STREQUAL "Torch")
    set(single_query_given "${Torch_DIR}")
    find_package(Torch ${SINGLE_QUERY_TORCH_MINIMUM} QUIET BYPASS_PROVIDER)
    if(NOT Torch_FOUND)
      single_query_supply_torch("${single_query_given}")
    endif()
  elseif("${package}" STREQUAL "Catch2")
    foreach(single_query_version 3 2.13) # asked for apart: each refuses the other's number
      if(NOT Catch2_FOUND)
        find_package(Catch2 ${single_query_version} QUIET BYPASS_PROVIDER)
      endif()
    endforeach()
    if(NOT Catch2_FOUND)
      single_query_supply_catch2()
    endif()
  endif()
endmacro()

cmake_language(SET_DEPENDENCY_PROVIDER single_query_provide_dependency SUPPORTED_METHODS FIND_PACKAGE)
