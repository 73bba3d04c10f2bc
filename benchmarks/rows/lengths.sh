#!/usr/bin/env bash
# Lengths that vary on small cards: the rows that the page of 26 November lacks. On one GPU of 80 GB, at the top of the
# repository, with DS-Slide installed:
#     OUT=... bash benchmarks/rows/lengths.sh vision tests                        # about 330 s
#     OUT=... PARENT=TREE PARENT_PATH=SITE bash benchmarks/rows/lengths.sh constant segments    # about 330 s
# PARENT, PARENT_PATH: the checkout and the installation of commit 8ea2f72. BUDGET: seconds of this call, 590.
# TINY=1: the same with tiny models on the CPU, without the row "vision". None of these rows has run in this form.
: "${OUT:=out}"; mkdir -p "$OUT"; BUDGET=${BUDGET:-590} TINY=${TINY:-}
export THP_MEM_ALLOC_ENABLE=1
say() { echo "[$SECONDS] $*"; }
left() { echo $((BUDGET - SECONDS)); }
limited() { # SECONDS COMMAND...: within the budget; an interrupted run writes its record, too
  local limit=$1; shift; [ "$limit" -gt "$(left)" ] && limit=$(left)
  [ "$limit" -lt 30 ] && { echo "no time for: $*" | cut -c1-200; return 124; }
  timeout -s INT -k 10 "$limit" "$@"; }
varying() { # NAME SECONDS OPTIONS of lengths.py
  local name=$1 limit=$2; shift 2
  limited "$limit" python3 benchmarks/lengths.py "$@" --out "$OUT/lengths_$name.jsonl" > "$OUT/lengths_$name.log" 2>&1
  tail -1 "$OUT/lengths_$name.log" | cut -c1-700; say "$name"; }
[ $# -gt 0 ] || set -- vision tests constant segments
for row in "$@"; do case $row in
# Qwen2.5-VL with images, 60 steps, the longest last: none runs out. The two share the GPU, and the host's memory.    240 s
vision) varying vision-1 400 --case vision --gib 24 --batch 1 &
        varying vision-4 400 --case vision --gib 24 --batch 4; wait;;
# Memory that is taken in the middle of a step: the same bits.                                                        120 s
tests) limited 200 python3 -m pytest -q ${TINY:+--collect-only} -m gpu -p no:cacheprovider --tb=short tests/gpu/test_out_of_memory.py \
         > "$OUT/lengths_tests.log" 2>&1; tail -5 "$OUT/lengths_tests.log" | cut -c1-300; say tests;;
# 3 B, 1 x 2048 x 4 in 24 GiB beside the parent: at most 1.03.                                                        240 s
constant) limited 330 python3 benchmarks/beside_commit.py --tree "$PARENT" --path "$PARENT_PATH" --rows "$( [ "$TINY" ] && echo tiny || echo 1x4 )" \
            --records "$OUT/lengths_constant.jsonl" 2> "$OUT/lengths_constant.log" | grep "^|"; say constant;;
# 14 B with adapters, 4 x 2048, with and without segments of torch's allocator that expand.                           150 s
segments) A=(--case "$( [ "$TINY" ] && echo tiny || echo lora )" --gib 24 --batch 4 --constant "$( [ "$TINY" ] && echo 64 || echo 2048 )" --steps 16)
          varying expanding 120 "${A[@]}"
          PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False varying fixed 120 "${A[@]}";;
esac; done
