#!/usr/bin/env bash
# The tests' own test: applies each fault of mutations.txt by itself to a copy of the sources, builds, runs the tests,
# and prints a table of which test found which fault. Exit status: 0 all were found, 1 one survived, 2 one does not apply.
#
#   test/mutate.sh cpu|cuda|check [WORK_FOLDER] [PATTERN]
#
# cpu: the host twins (only C++ is compiled again). cuda: the kernels; needs a GPU. check: only whether the faults still
# apply. PATTERN: only faults whose name matches. From the environment: CMAKE_OPTIONS, JOBS (2).
set -euo pipefail

device=${1:?cpu, cuda or check}
work=$(realpath -m "${2:-build-mutate}")
pattern=${3:-}
source=$(cd "$(dirname "$0")/.." && pwd)
jobs=${JOBS:-2}
filter=$([[ $device == cpu ]] && echo '~[gpu]' || echo '[gpu]')

mkdir -p "$work"
rm -rf "$work/source"
mkdir "$work/source"
(cd "$source" && tar cf - CMakeLists.txt cmake kernel test) | (cd "$work/source" && tar xf -)
if [[ $device != check ]]; then
# shellcheck disable=SC2086
cmake -S "$work/source" -B "$work/build" -G "Unix Makefiles" -DSINGLE_QUERY_BUILD_TORCH=OFF ${CMAKE_OPTIONS:-} >"$work/log"
cmake --build "$work/build" --target single_query_kernel_tests -j "$jobs" >>"$work/log"
fi

# Compiles one C++ source of the library; $2 is the folder of the object.
compile() {
  g++ -std=c++20 -O1 -w -I"$work/source/kernel" -I"$work/source/kernel/include" -isystem "$cuda/include" \
    -c "$1" -o "$2/$(basename "$1").o"
}
cuda=$([[ $device == check ]] || sed -n 's/^CUDAToolkit_ROOT[^=]*=//p; s|^CMAKE_CUDA_COMPILER:[^=]*=\(.*\)/bin/nvcc|\1|p' "$work/build/CMakeCache.txt" | head -1)
export -f compile
export work cuda

# The host twins' objects go before the library that holds the sound ones.
objects_without_fault() {
  rm -rf "$work/sound" "$work/faulty"
  mkdir -p "$work/sound"
  find "$work/source/kernel" -name '*.cpp' -print0 | xargs -0 -P "$jobs" -I{} bash -c 'compile {} "$work/sound"'
}

build_cpu() { # $1: the file with the fault
  rm -rf "$work/faulty"
  cp -r "$work/sound" "$work/faulty"
  if [[ $1 == *.cpp ]]; then
    compile "$work/source/$1" "$work/faulty"
  else
    find "$work/source/kernel" -name '*.cpp' -print0 | xargs -0 -P "$jobs" -I{} bash -c 'compile {} "$work/faulty"'
  fi
  local link
  link=$(sed "s|-o [^ ]*|-o $work/tests|; s|[^ ]*libsingle_query_kernel.a|$work/faulty/*.o &|" \
    "$work/build/test/CMakeFiles/single_query_kernel_tests.dir/link.txt")
  (cd "$work/build/test" && eval "$link")
}

build_cuda() {
  cmake --build "$work/build" --target single_query_kernel_tests -j "$jobs"
  cp "$work/build/test/single_query_kernel_tests" "$work/tests"
}

survivors=0
stale=0
row() { printf '| %s | `%s` | %s |\n' "$1" "$2" "$3"; }

# One fault: name, file, the text before and after.
try() {
  local name=$1 file=$2 before=$3 after=$4
  [[ -z $pattern || $name =~ $pattern ]] || return 0
  local path=$work/source/$file
  local text
  text=$(cat "$path" && echo x)
  text=${text%x}
  if [[ $text != *"$before"* ]]; then
    row "$name" "$file" "does not apply"
    stale=1
    return 0
  fi
  [[ $device != check ]] || return 0
  cp "$path" "$work/kept"
  printf '%s' "${text/"$before"/"$after"}" >"$path"
  local found
  if ! "build_$device" "$file" >"$work/log" 2>&1; then
    found="does not compile"
    stale=1
  elif timeout 900 "$work/tests" "$filter" --abort >"$work/output" 2>&1; then
    found="**survived**"
    survivors=1
  else
    local status=$?
    # Between the first two rules stands the name of the test that failed, on one or more lines.
    found=$(awk '/^-{20,}$/ { rules++; next } rules == 1 { printf "%s%s", gap, $0; gap = " " } rules == 2 { exit }' \
      "$work/output")
    ((status != 124)) || found="$found (did not end)"
    found=${found:-the process died with status $status}
  fi
  cp "$work/kept" "$path"
  row "$name" "$file" "$found"
}

[[ $device != cpu ]] || objects_without_fault
echo "| fault | in | found by |"
echo "|---|---|---|"
name='' file='' devices='' before='' after=''
flush() {
  if [[ -n $name && ($devices == both || $devices == "$device" || $device == check) ]]; then
    try "$name" "$file" "${before%$'\n'}" "${after%$'\n'}"
  fi
  name='' before='' after=''
}
while IFS= read -r line; do
  case $line in
  '['*']'*)
    flush
    name=${line#\[}
    name=${name%%\]*}
    read -r devices file <<<"${line#*\]}"
    ;;
  '- '*) before+=${line#- }$'\n' ;;
  '+ '*) after+=${line#+ }$'\n' ;;
  esac
done <"$source/test/mutations.txt"
flush
exit $((survivors ? 1 : stale ? 2 : 0))
