#!/usr/bin/env bash
# Several GPUs of one host, up to four. Run at the top of the repository, with DS-Slide and peft installed:
#     OUT=DIR bash benchmarks/rows/several_gpus.sh NAME...        names are sections or groups, done in this order
# BUDGET (seconds of this call, 300): a section gets what is left of it, and none begins with less than 25 s left.
# ONLY: a pattern in the options of a plan's settings. '^(?!.*clip)': with clipping, 8x2048, varying, 2x2048x4 and 1x2048x4 (200 s on four).
# $OUT gets settings.jsonl, sequences.jsonl, info.txt, log.txt and tests.txt after each section, with what earlier calls on this
# machine have left in /tmp/four. TINY=1: the same with tiny models on the CPU.
#
# section      GPUs     estimate   what
# info         -           5 s     topology, cores, NUMA, memory, disk
# doctor       0123       60 s     `ds-slide doctor`: one GPU, then each rank alone and all at once, with pairs of ranks
# four         0123     450 s      3 B slide, 50 steps each: 8x2048 c1, varying 1x2048x4 c1, 2x2048x4 c1 (220 s), then as in `rest`
# rest         0123     230 s      8x2048 c0, 2x2048x4 c0, 1x2048x4 c1, varying c0
# pairs        012 + 3  340 s      `four` with 20 steps on GPU 0 and on GPUs 1,2, and the longest sequence of GPU 3 (40 GiB of it), side by side, 16 cores a rank
# pairs_rest   012      180 s      `rest` with 20 steps on GPU 0 and on GPUs 1,2
# small        01, 0    330 s      3 B, 1 x 2048 x 4, with and without recordings, one length and twelve: on two GPUs, then on one with half of the cores
# small3       01 + 2    220 s     the two parts of `small` side by side, 16 cores a rank
# causes       01       100 s     what a step of `small` goes to, with the kernels of collectives: causes.log
# causes12     01       100 s     the same with twelve lengths
# stock        0123      90 s      3 B stock 8x2048 c1, 10 steps (compiles cpu_adam if `warm` has not)
# one, two     0 / 12    150 s     the two parts of `pairs` by themselves, 16 cores a rank
# images       0123      90 s      Qwen2.5-VL-3B, images on ranks 0 and 1, 20 steps
# large7       0123      55 s      7.6 B, 8x2048 c1, zero.Init
# large14      0123      80 s      14 B, 8x2048 c1, zero.Init
# lora32       0123     110 s      32 B LoRA r 16, 4x2048 c1, zero.Init
# sequences    01 + 23  130 s      longest sequence of two GPUs (40 GiB each); beside it 65,536 tokens on two whole GPUs: slide, stock
# sequences2   01       480 s     the same on a host with two: longest sequence of GPU 0, then of both (40 GiB each), then 65,536 tokens: slide, stock
# stock2       01       110 s     stock's longest sequence on two GPUs, 40 GiB each (it did 32,768)
# seq1         0         40 s      65,536 tokens on one whole GPU, slide
# whole        0 + 12   170 s      longest on whole cards (optional)
# tests        01 + 23  200 s      test_hangs.py and test_ranks_that_differ.py, two pytest processes
# groups: first = warm info four; second = pairs stock images; third = large7 large14 lora32; fourth = sequences tests; fifth = rest pairs_rest
set -u
: "${OUT:?}"
BUDGET=${BUDGET:-300} WORK=${WORK:-/tmp/four} TINY=${TINY:-}
mkdir -p "$WORK"
mapfile -t CORES < <(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')

left() { echo $((BUDGET - SECONDS)); }

# One launch under the stock launcher. launch LIMIT GPUS CORES PORT LOG ARGUMENTS...
launch() {
  local limit=$1 gpus=$2 cores=$3 port=$4 log=$WORK/$5.log; shift 5
  local ranks=$(($(tr -cd , <<<"$gpus" | wc -c) + 1)) threads=$(($(tr -cd , <<<"$cores" | wc -c) + 1)) where=(--include "localhost:$gpus") pin=(taskset -c "$cores")
  [ "$TINY" ] && where=(--num_gpus "$ranks") pin=()
  echo "== $(date +%T) $limit s, GPUs $gpus, cores $cores: $*" >> "$log"
  # ABRT goes to the launcher's whole process group, and makes every Python print the stacks of its threads.
  env -u CUDA_VISIBLE_DEVICES PYTHONFAULTHANDLER=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads / ranks > 0 ? threads / ranks : 1))} \
    timeout -s ABRT -k 5 "$limit" "${pin[@]}" python3 -m deepspeed.launcher.runner "${where[@]}" --master_port "$port" "$@" >> "$log" 2>&1
}

# Settings of a plan, started again after one that fails. plan LIMIT EACH GPUS CORES PORT NAME PLAN
plan() {
  local limit=$1 each=$2 gpus=$3 cores=$4 port=$5 name=$6 what=$7 begin=$SECONDS rest try code
  for try in 1 2 3 4; do
    rest=$((limit - (SECONDS - begin))); [ "$rest" -gt "$(left)" ] && rest=$(left)
    [ "$rest" -lt 20 ] && { echo "-- $name: no time for try $try"; break; }
    launch "$rest" "$gpus" "$cores" "$port" "$name" benchmarks/several_gpus.py --plan "${TINY:+tiny-}$what" --only "${ONLY:-}" --go-on --limit "$each" --out "$WORK/$name.settings"
    code=$?
    echo "-- $name: try $try ended with code $code after $((SECONDS - begin)) s"
    [ "$code" = 0 ] && break
    grep -aE 'Error|error:|waits for|is gone|Timeout' "$WORK/$name.log" | tail -4 | cut -c1-300
  done
}

# Lengths in ascending order until one fails. lengths LIMIT EACH GPUS CORES PORT NAME OPTIONS...
lengths() {
  local limit=$1 each=$2 gpus=$3 cores=$4 port=$5 name=$6 begin=$SECONDS; shift 6
  [ "$limit" -gt "$(left)" ] && limit=$(left)
  [ "$limit" -lt 20 ] && { echo "-- $name: no time"; return; }
  [ "$TINY" ] && set -- --model tiny --values 128 256
  launch "$limit" "$gpus" "$cores" "$port" "$name" benchmarks/sequences.py "$@" --limit "$each" --out "$WORK/$name.sequences"
  echo "-- $name: ended with code $? after $((SECONDS - begin)) s"
}

# The cores from quarter $1 up to quarter $2 of those that this process may use, with commas.
part() { local begin=$((${#CORES[@]} * $1 / 4)) end=$((${#CORES[@]} * $2 / 4)); (IFS=,; echo "${CORES[*]:begin:end - begin}"); }

warm() { (python3 -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()' > "$WORK/warm.log" 2>&1 &) ; }
info() {
  { date; nvidia-smi; nvidia-smi topo -m; lscpu | grep -iE 'model name|numa|^cpu\(s\)|socket'; free -g; df -h / /dev/shm /tmp; git log -1 --oneline; } > "$WORK/info.txt" 2>&1; grep -aE 'NUMA node|GPU[0-9].*NV|Mem:' "$WORK/info.txt" | head -12
}
doctor() { timeout -k 5 150 python3 -m ds_slide doctor ${TINY:+--ranks 4} > "$WORK/doctor.log" 2>&1; tail -40 "$WORK/doctor.log"; }
four() { plan 480 110 0,1,2,3 "$(part 0 4)" 29601 four four; }
rest() { plan 285 110 0,1,2,3 "$(part 0 4)" 29601 rest four-rest; }
stock() { plan 110 100 0,1,2,3 "$(part 0 4)" 29602 stock four-stock; }
small() { plan 240 110 0,1 "$(part 0 4)" 29607 small recorded; plan 200 110 0 "$(part 0 2)" 29608 small-one recorded; }
small3() { plan 240 110 0,1 "$(part 0 2)" 29607 small recorded & local a=$!; plan 240 110 2 "$(part 2 3)" 29608 small-one recorded & wait "$a" $!; }
causes() {
  local setting=(--model qwen2.5-3b --seq 2048 --warmup 14); [ "$TINY" ] && setting=(--model tiny --seq 64 --warmup 3)
  launch "$(left)" 0,1 "$(part 0 2)" 29609 causes benchmarks/step_causes.py --system slide --clip 1.0 --batch 1 --grad-accum 4 --operators "${setting[@]}" "$@"
  grep -a '^|' "$WORK/causes.log"
}
causes12() { causes --shortest 256 --distinct-batches 12; }
images() { plan 110 100 0,1,2,3 "$(part 0 4)" 29603 images images; }
large7() { plan 100 90 0,1,2,3 "$(part 0 4)" 29604 large7 large-7b; }
large14() { plan 140 130 0,1,2,3 "$(part 0 4)" 29605 large14 large-14b; }
lora32() { plan 180 170 0,1,2,3 "$(part 0 4)" 29606 lora32 large-lora; }
one() { plan 400 80 0 "$(part 0 1)" 29611 one four-fewer; }
two() { plan 400 80 1,2 "$(part 1 3)" 29612 two four-fewer; }
pairs() { one & local a=$!; two & local b=$!; longest1 3 "$(part 3 4)" & wait "$a" "$b" $!; }
pairs_rest() {
  plan 200 80 0 "$(part 0 1)" 29611 one-rest four-fewer-rest & local a=$!
  plan 200 80 1,2 "$(part 1 3)" 29612 two-rest four-fewer-rest & wait "$a" $!
}
longest1() { lengths 170 60 "$1" "$2" 29613 longest1 --gib 40 --values 65536 81920 90112 98304 106496 114688 122880 131072 --slide '{"host_memory": "100GiB"}'; }
longest2() { lengths 170 80 "$1" "$2" 29614 longest2 --gib 40 --values 131072 163840 180224 196608 212992 229376 245760 262144 --slide '{"host_memory": "100GiB"}'; }
speed2() {
  lengths 70 60 "$1" "$2" 29615 speed-slide --values 65536 --steps 4
  lengths 110 100 "$1" "$2" 29616 speed-stock --system stock --values 65536 73728 81920 98304 --steps 2
}
sequences() { longest2 0,1 "$(part 0 2)" & local first=$!; speed2 2,3 "$(part 2 4)" & wait $first $!; }
sequences2() {
  local host='{"host_memory": "100GiB"}'
  warm
  lengths 150 60 0 "$(part 0 2)" 29620 longest1 --gib 40 --values 147456 163840 180224 196608 --slide "$host"
  lengths 200 90 0,1 "$(part 0 4)" 29621 longest2 --gib 40 --values 270336 294912 327680 --slide "$host"
  speed2 0,1 "$(part 0 4)"
}
stock2() { warm; lengths 150 60 0,1 "$(part 0 4)" 29622 longest-stock --system stock --gib 40 --values 36864 40960 45056 49152 --steps 1; }
seq1() { lengths 70 60 0 "$(part 0 1)" 29617 speed-one --values 65536 --steps 4; }
whole() {
  lengths 200 100 0 "$(part 0 1)" 29618 whole1 --values 196608 212992 229376 245760 &
  local first=$!
  lengths 250 150 1,2 "$(part 1 3)" 29619 whole2 --values 393216 425984 458752 &
  wait $first $!
}
pytest_on() {  # GPUS CORES NAME ARGUMENTS...
  local gpus=$1 cores=$2 name=$3 limit; shift 3; limit=$(left); [ "$limit" -gt 280 ] && limit=280
  local pin=(taskset -c "$cores") on=(CUDA_VISIBLE_DEVICES="$gpus") mark=(-m gpu)
  [ "$TINY" ] && pin=() on=(SLIDE_GPU_TESTS_DEVICE=cpu)
  env "${on[@]}" PYTHONFAULTHANDLER=1 timeout -s ABRT -k 5 "$limit" "${pin[@]}" python3 -m pytest "${mark[@]}" -q -p no:cacheprovider --durations=0 \
    --basetemp "$WORK/pytest-$name" "$@" > "$WORK/$name.tests" 2>&1
  echo "-- tests $name: code $?; $(tail -1 "$WORK/$name.tests")"
}
tests() {
  pytest_on 2,3 "$(part 2 4)" faults tests/gpu/test_ranks_that_differ.py tests/gpu/test_hangs.py -k 'not nothing' &
  local first=$!
  pytest_on 0,1 "$(part 0 2)" nothing tests/gpu/test_hangs.py -k nothing &
  wait $first $!
}
first() { do_all warm info four; }
second() { do_all pairs stock images; }
third() { do_all large7 large14 lora32; }
fourth() { do_all sequences tests; }
fifth() { do_all rest pairs_rest; }

pack() {
  cat "$WORK"/*.settings > "$OUT/settings.jsonl" 2>/dev/null
  cat "$WORK"/*.sequences > "$OUT/sequences.jsonl" 2>/dev/null
  cp "$WORK/info.txt" "$OUT/" 2>/dev/null
  for log in "$WORK"/*.log; do echo "######## $log"; tail -c 1000000 "$log"; done > "$OUT/log.txt" 2>/dev/null
  for log in "$WORK"/*.tests; do echo "######## $log"; tail -c 1000000 "$log"; done > "$OUT/tests.txt" 2>/dev/null
}
do_all() {
  for section in "$@"; do
    [ "$(left)" -lt 25 ] && { echo "-- $section: left out, $(left) s are left"; continue; }
    local begin=$SECONDS; "$section"; echo "-- section $section: $((SECONDS - begin)) s"; pack
  done
}
trap pack EXIT
do_all "$@"
pack
python3 benchmarks/ranks_page.py "$OUT/settings.jsonl" "$OUT/sequences.jsonl" 2>&1 | cut -c1-330
