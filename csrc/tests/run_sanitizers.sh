#!/usr/bin/env bash
# Builds csrc/tests/stress.cpp and io_stress.cpp with ThreadSanitizer, then with AddressSanitizer and UBSan, and runs
# them. The files of io_stress go to the build folder, which should be on a disk: on a tmpfs O_DIRECT is left untried.
# Usage: csrc/tests/run_sanitizers.sh [build folder]     (CXX names the compiler, default g++)
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build/sanitize}
compiler=${CXX:-g++}
flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra -pthread -Icsrc)

stress_sources=(csrc/tests/stress.cpp csrc/threads/*.cpp csrc/memory/*.cpp csrc/update/*.cpp csrc/checksum/*.cpp)
io_stress_sources=(csrc/tests/io_stress.cpp csrc/io/*.cpp)
isa_flags() { # the same as in setup.py
  case "$(uname -m):$1" in
    x86_64:*_sse42.cpp) echo "-msse4.2" ;;
    x86_64:*_avx2.cpp) echo "-mavx2 -mf16c" ;;
    x86_64:*_avx512.cpp) echo "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -Wno-maybe-uninitialized" ;;
  esac
}

run() { # program, name, sanitizer flags
  local program=$1 name=$2; shift 2
  mkdir -p "$build/$name"
  local -n sources="${program}_sources"
  local objects=()
  for source in "${sources[@]}"; do
    local object; object="$build/$name/$(basename "$source" .cpp).o"
    # shellcheck disable=SC2046
    "$compiler" "${flags[@]}" "$@" $(isa_flags "$source") -c "$source" -o "$object" &
    objects+=("$object")
    (( ${#objects[@]} % $(nproc) == 0 )) && wait
  done
  wait
  "$compiler" "${flags[@]}" "$@" "${objects[@]}" -o "$build/$name/$program" -ldl
  echo "== $program, $name"
  "$build/$name/$program" "$build/$name"
}

for program in stress io_stress; do
  TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" run $program thread -fsanitize=thread
  UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1 ${UBSAN_OPTIONS:-}" run $program address -fsanitize=address,undefined
done
