#!/usr/bin/env bash
# The tests' own test: applies each fault of mutations.txt by itself to a copy of the sources, builds, runs the tests,
# and prints a table of which test found which fault. Exit status: 0 all were found, 1 one survived, 2 one does not apply
# or does not compile, 3 the tests fail without a fault.
#
#   test/mutate.sh cpu|cuda|check [WORK_FOLDER] [PATTERN]
#
# cpu: the host twins (only C++ is compiled again). cuda: the kernels; needs a GPU. check: only whether the faults still
# apply. PATTERN: only faults whose name matches. From the environment:
#   CMAKE_OPTIONS   of the sound build, whose test objects all faults share
#   JOBS            faults at once (2)
#   RUNS            of them, how many may have their tests run at once, since those share one GPU (JOBS)
#   LAUNCHER        what the tests run under, e.g. compute-sanitizer --tool racecheck --error-exitcode 1
#   LIMIT           seconds the tests may take (600)
#
# The short tests go first, all tests only over what they let pass, one fault at a time. The short ones have to pass
# without a fault, or whatever makes them fail would count as having found every fault.
set -euo pipefail

device=${1:?cpu, cuda or check}
work=$(realpath -m "${2:-build-mutate}")
pattern=${3:-}
source=$(cd "$(dirname "$0")/.." && pwd)
jobs=${JOBS:-2}
runs=${RUNS:-$jobs}
filter=$([[ $device == cpu ]] && echo '~[gpu]' || echo '[gpu]~[.]')
objects=$work/build/kernel/CMakeFiles/single_query_kernel.dir

build_sound() {
  mkdir -p "$work/source"
  (cd "$source" && tar cf - CMakeLists.txt cmake kernel test) | (cd "$work/source" && tar xf -)
  # shellcheck disable=SC2086
  cmake -S "$work/source" -B "$work/build" -G "Unix Makefiles" -DSINGLE_QUERY_BUILD_TORCH=OFF \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON ${CMAKE_OPTIONS:-}
  cmake --build "$work/build" --target single_query_kernel_tests -j "$jobs"
}

# The sources that a fault in kernel/$1 changes the object of, and that matter on this device.
changed_sources() {
  if [[ $1 == *.cpp || $1 == *.cu ]]; then
    echo "$1"
    return
  fi
  local dependencies name
  for dependencies in "$objects"/*.o.d; do
    name=$(basename "$dependencies" .o.d)
    [[ $device == cpu && $name == *.cu || $device == cuda && $name == *_cpu.cpp ]] && continue
    ! grep -q "kernel/$1\b" "$dependencies" || echo "$name"
  done
}

# $1: the fault's folder, $2: a source of its kernel/. C++ without what makes compilation slow.
compile() {
  local command
  command=$(sed -n 's/^  "command": "\(.*\)",\{0,1\}$/\1/p' "$work/build/compile_commands.json" |
    grep single_query_kernel.dir | grep -E "/kernel/$2( |\$)") || return
  command=${command//\\\"/\"}
  command=${command//"$work/source/kernel"/"$1/kernel"}
  command=$(sed "s|-o [^ ]*|-o $1/objects/$2.o|" <<<"$command")
  [[ $2 != *.cpp ]] || command+=" -O1 -w"
  (cd "$work/build/kernel" && eval "$command")
}

# The fault's objects come first, so that it is their inline functions that are linked. Each command says itself that it
# failed: bash does not stop at errors in what an `if` asks.
build_faulty() { # $1: the fault's folder, $2: the file in kernel/ with the fault
  local names name link
  mkdir "$1/objects"
  cp "$objects"/*.o "$1/objects"
  names=$(changed_sources "$2")
  [[ -n $names ]] || return
  for name in $names; do
    rm "$1/objects/$name.o" || return
    compile "$1" "$name" || return
  done
  link=$(sed "s|-o [^ ]*|-o $1/tests $1/objects/*.o|" \
    "$work/build/test/CMakeFiles/single_query_kernel_tests.dir/link.txt")
  (cd "$work/build/test" && eval "$link")
}

# Waits for one of the places for running tests, which is given back when the shell of the fault ends.
take_place() {
  local place
  while true; do
    for ((place = 0; place < runs; ++place)); do
      exec {lock}>"$work/places/$place"
      ! flock -n "$lock" || return 0
      exec {lock}>&-
    done
    sleep 0.2
  done
}

# For tests that nothing may run beside: some look at how much memory the GPU has left.
take_all_places() {
  local place
  exec {lock}>&-
  for ((place = 0; place < runs; ++place)); do
    exec {lock}>"$work/places/$place"
    flock "$lock"
  done
}

run_tests() { # $1: the executable, $2: for its output, $3: of the sweeps every so manieth configuration, $4: which tests
  # shellcheck disable=SC2086
  SINGLE_QUERY_SWEEP_STRIDE=$3 timeout -k 10 "${LIMIT:-600}" ${LAUNCHER:-} "$1" "$4" --abort >"$2" 2>&1
}

# One fault: number, name, file, the text before and after. Leaves its row of the table in rows/.
try() {
  local number=$1 name=$2 file=$3 before=$4 after=$5 text found status
  text=$(cat "$source/$file" && echo x)
  text=${text%x}
  if [[ $text != *"$before"* ]]; then
    found="does not apply"
  elif [[ $device == check ]]; then
    return 0
  else
    local folder=$work/faults/$number
    mkdir -p "$folder"
    cp -r "$work/source/kernel" "$folder"
    printf '%s' "${text/"$before"/"$after"}" >"$folder/$file"
    if ! build_faulty "$folder" "${file#kernel/}" >"$folder/log" 2>&1; then
      found="does not compile"
    else
      take_place
      status=0
      run_tests "$folder/tests" "$folder/output" 11 "$filter~[large]" || status=$?
      if ((status == 0)); then
        take_all_places
        run_tests "$folder/tests" "$folder/output" 1 "$filter" || status=$?
      fi
      # Between two rules stands the name of a test, on one or more lines: last of the one that failed, before it of those
      # that had something to say.
      found=$(awk '/^--------------------/ { if (rules++ % 2 == 0) name = gap = ""; next }
        rules % 2 == 1 { name = name gap $0; gap = " " } END { print name }' "$folder/output")
      if ((status == 0)); then
        found="**survived**"
      elif ((status == 124 || status == 137)); then
        found="$found (did not end)"
      else
        found=${found:-the process ended with status $status}
      fi
    fi
    rm -rf "$folder/kernel" "$folder/objects" "$folder/tests" # the log and the output stay
  fi
  printf '| %s | `%s` | %s |\n' "$name" "${file#kernel/}" "$found" | tee "$work/rows/$number"
}

count=0
flush() { # the fault that has been read
  [[ -n $name && $name =~ $pattern && ($devices == both || $devices == "$device" || $device == check) ]] || return 0
  while (($(jobs -rp | wc -l) >= jobs)); do
    wait -n || true
  done
  count=$((count + 1))
  try "$(printf '%03d' "$count")" "$name" "$file" "${before%$'\n'}" "${after%$'\n'}" &
}

mkdir -p "$work"
rm -rf "$work/rows" "$work/faults" "$work/places"
mkdir "$work/rows" "$work/places"
if [[ $device != check ]]; then
  build_sound >"$work/log"
  if ! run_tests "$work/build/test/single_query_kernel_tests" "$work/output" 11 "$filter~[large]"; then
    echo "the tests fail without a fault, see $work/output" >&2
    exit 3
  fi
fi
name='' file='' devices='' before='' after=''
while IFS= read -r line; do
  case $line in
  '['*']'*)
    flush
    name=${line#\[}
    name=${name%%\]*}
    read -r devices file <<<"${line#*\]}"
    before='' after=''
    ;;
  '- '*) before+=${line#- }$'\n' ;;
  '+ '*) after+=${line#+ }$'\n' ;;
  esac
done <"$source/test/mutations.txt"
flush
wait
printf '\n| fault | in | found by |\n|---|---|---|\n'
cat "$work"/rows/* >"$work/table" 2>/dev/null || true # no fault, no row
cat "$work/table"
! grep -q '| \*\*survived\*\* |$' "$work/table" || exit 1
! grep -qE '\| does not (apply|compile) \|$' "$work/table" || exit 2
