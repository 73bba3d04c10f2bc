#!/usr/bin/env bash
# Commands side by side on the GPUs of one host: each has its GPUs and their share of the cores, and the next command of
# the list begins where one has ended. Run at the top of the repository, with DS-Slide installed:
#     OUT=DIR BUDGET=590 bash benchmarks/rows/side_by_side.sh LIST
# LIST: a file with a command a line, the most important first, for example
#     bash benchmarks/rows/recorded.sh l b
#     bash benchmarks/rows/adapters.sh d4 b
# Each runs with OUT=DIR/NUMBER and the BUDGET that is left, and none begins with less than 40 s. What it prints is in
# DIR/NUMBER/out.txt, and here when it has ended. GPUS=2: two GPUs for each command. TINY=N: N commands at once, on the CPU.
# The commands share the link to the disk and, on one socket, the host's memory: compare rows of one command only.
set -u
: "${OUT:?}"
LIST=$1 BUDGET=${BUDGET:-590} GPUS=${GPUS:-1} TINY=${TINY:-}
mkdir -p "$OUT"; OUT=$(cd "$OUT" && pwd)
mapfile -t CORES < <(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
count=${TINY:-$(nvidia-smi --list-gpus | wc -l)}; places=$((count / GPUS))
begin=$(date +%s); echo 0 > "$OUT/next"

left() { echo $((BUDGET - $(date +%s) + begin)); }
next() { # the number of the next command
  (flock 9; number=$(cat "$OUT/next"); echo $((number + 1)) > "$OUT/next"; echo "$number") 9> "$OUT/lock"
}
part() { # the cores of a place, with commas
  local from=$((${#CORES[@]} * $1 / places)) to=$((${#CORES[@]} * ($1 + 1) / places)); (IFS=,; echo "${CORES[*]:from:to - from}")
}
work() { # all that one place has time for
  local place=$1 number rest code gpus pin=(taskset -c "$(part "$1")")
  gpus=$(seq -s, $((place * GPUS)) $((place * GPUS + GPUS - 1))); [ "$TINY" ] && pin=()
  while number=$(next); [ "$number" -lt "${#COMMANDS[@]}" ]; do
    rest=$(left)
    [ "$rest" -lt 40 ] && { echo "== no time for $number: ${COMMANDS[number]}"; return; }
    mkdir -p "$OUT/$number"
    env OUT="$OUT/$number" BUDGET="$rest" WORK="$OUT/$number/work" CUDA_VISIBLE_DEVICES="$gpus" timeout -k 5 "$rest" "${pin[@]}" bash -c "${COMMANDS[number]}" \
      > "$OUT/$number/out.txt" 2>&1
    code=$?
    echo "== $number on GPU $gpus, code $code, $((rest - $(left))) s: ${COMMANDS[number]}"; tail -c "${TAIL:-1500}" "$OUT/$number/out.txt"
  done
}
mapfile -t COMMANDS < <(grep -v '^ *\(#\|$\)' "$LIST")
for ((place = 0; place < places; place++)); do work "$place" & done
wait
