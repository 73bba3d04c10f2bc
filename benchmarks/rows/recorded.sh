#!/usr/bin/env bash
# Small micro-batches and recorded blocks, on one GPU of 80 GB. Run at the top of the repository, with DS-Slide installed:
#     OUT=... bash benchmarks/rows/recorded.sh tests causes a k             # about 480 s
#     OUT=... bash benchmarks/rows/recorded.sh v b g                        # about 560 s
#     OUT=... bash benchmarks/rows/recorded.sh c3 c3-6 n                    # about 400 s
#     OUT=... bash benchmarks/rows/recorded.sh c3 c7 m h                    # about 490 s: 24 GiB beside the host's own rates
#     OUT=... bash benchmarks/rows/recorded.sh m l c3-off                   # about 380 s
#     OUT=... bash benchmarks/rows/recorded.sh w s                          # about 550 s
# BUDGET (seconds of this call, 590): a row gets what is left of it, and none begins with less than 30 s left.
# Order of importance: as listed. One JSON record a row in $OUT/recorded_NAME.jsonl, a line of it here. TINY=1: the same
# with tiny models on the CPU. Hosts differ and are noisy: compare rows of one call only.
# Figures in comments: what is wanted, and estimates of seconds in all. Rows tests, causes, a, v (without GPU only), g and n
# have run, and c3 and c7 before recordings were expected (benchmarks/results/2026-11-27_nvidia-h100_recorded-blocks_3.md).
: "${OUT:=out}"; mkdir -p "$OUT"; BUDGET=${BUDGET:-590} TINY=${TINY:-}
export THP_MEM_ALLOC_ENABLE=1
say() { echo "[$SECONDS] $*"; }
left() { echo $((BUDGET - SECONDS)); }
limited() { # SECONDS COMMAND...: within the budget
  local limit=$1; shift; [ "$limit" -gt "$(left)" ] && limit=$(left)
  [ "$limit" -lt 30 ] && { echo "no time for: $*" | cut -c1-200; return 124; }
  timeout -k 5 "$limit" "$@"; }
tiny() { # the options of a row, with tiny sizes where TINY is set
  [ "$TINY" ] && { echo --model tiny --seq 64 --shortest "$(( $1 ? 32 : 0 ))" --steps 2 --patch=; }; return 0; }
row() { # NAME SECONDS OPTIONS of step.py
  local name=$1 limit=$2 code varies=0; shift 2; rm -f "$OUT/recorded_$name.jsonl"
  case " $* " in *" --shortest "*) varies=1;; esac
  # shellcheck disable=SC2046
  limited "$limit" python3 benchmarks/step.py --clip 1.0 "$@" $(tiny $varies) --out "$OUT/recorded_$name.jsonl" > "$OUT/recorded_$name.log" 2>&1
  code=$?; [ $code = 0 ] || { echo "FAILED $name ($code)"; tail -4 "$OUT/recorded_$name.log" | cut -c1-400; }
  [ -e "$OUT/recorded_$name.jsonl" ] && python3 - "$OUT/recorded_$name.jsonl" "$name" <<'P'
import json, sys
r = json.loads(open(sys.argv[1]).read().splitlines()[-1]); s = r["setting"]; g = lambda k: (r.get(k) or 0) / 1e9
a = (r.get("slide_stats") or {}).get("activations", {}); a = {k: a[k] for k in ("keep", "mix", "recompute", "replayed", "recorded_shapes", "recorded_bytes") if k in a}
print(f"{sys.argv[2]}: {s['system']} {s['model']} {s['batch']}x{s['seq']}x{s['grad_accum']} {s['compile']} {s['slide'] or ''} {r['status']} "
      f"{r.get('step_s', 0):.4f} s ({r.get('step_s_min', 0):.4f} to {r.get('step_s_max', 0):.4f}) bound {r.get('bound_s')} {r.get('bound_lane')} "
      f"eff {r.get('efficiency')} {a} GPU {g('gpu_peak_allocated_bytes'):.2f} reserved {g('gpu_peak_reserved_bytes'):.2f} GB "
      f"host peak {g('host_peak_bytes'):.1f} GB losses {[round(x, 5) for x in r.get('losses', [])[-3:]]} {r.get('device')} {r.get('error', '')[:200]}")
P
  say "$name"; return $code; }
three() { # NAME OPTIONS: DS-Slide, without recordings, and plain torch on the GPU
  local name=$1; shift
  row "$name" 110 --system slide "$@" --warmup 14
  row "$name-off" 110 --system slide "$@" --warmup 9 --slide '{"captured_blocks": false}'
  row "$name-gpu" 90 --system gpu-only "$@" --warmup 3 --patch ours --checkpointing none; }
SMALL=(--batch 1 --seq 2048 --grad-accum 8 --steps 6) F=1
[ "$TINY" ] || F=$(python3 -c "import torch; print(round(24 * 2**30 / torch.cuda.mem_get_info()[1], 4))"); say "24 GiB are $F of the card"
[ $# -gt 0 ] || set -- tests causes a k c3 c3-6 n c7 v b g m l c3-off w
for row in "$@"; do case $row in
# Bits, and the memory that recordings hold, for one shape and for three.                                              150 s
tests) limited 250 python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short tests/gpu/test_captured_blocks.py > "$OUT/recorded_tests.log" 2>&1
       tail -3 "$OUT/recorded_tests.log"; say tests;;
# What the step of row a goes to.                                                                                        70 s
# shellcheck disable=SC2046
causes) limited 120 python3 benchmarks/step_causes.py --system slide --model qwen2.5-3b --clip 1.0 "${SMALL[@]}" --warmup 14 $(tiny 0) \
          > "$OUT/recorded_causes.txt" 2>"$OUT/recorded_causes.log"; cat "$OUT/recorded_causes.txt"; tail -1 "$OUT/recorded_causes.log" | cut -c1-300; say causes;;
# What lengths that hardly ever come twice cost the host beside one length, operator by operator, without recordings.     150 s
# shellcheck disable=SC2046
causes-v) for more in "--shortest 64 --distinct-batches 400" ""; do
    limited 120 python3 benchmarks/step_causes.py --operators --system slide --model qwen2.5-3b --clip 1.0 --batch 1 --seq 2048 --grad-accum 4 --steps 6 --warmup 12 \
      --slide '{"captured_blocks": false}' $(tiny 1) $more > "$OUT/recorded_causes-v_${#more}.txt" 2>"$OUT/recorded_causes-v.log"; tail -60 "$OUT/recorded_causes-v_${#more}.txt"; done; say causes-v;;
# 3 B, 1 x 2048 x 8: at most 1.03 of GPU only, and 1.05 of the kernels' sum (k).                                       170 s
a) three a --model qwen2.5-3b "${SMALL[@]}";;
k) [ "$TINY" ] || limited 90 python3 benchmarks/kernel_sum.py --system gpu-only --model qwen2.5-3b "${SMALL[@]}" --patch ours --checkpointing none \
     2>"$OUT/recorded_k.log" | tee "$OUT/recorded_k.json"; say k;;
# 3 B, 1 x (256 to 2048) x 8: 12 lengths in turn, which 12 recordings serve. At most GPU only.                         190 s
v) three v --model qwen2.5-3b "${SMALL[@]}" --shortest 256 --distinct-batches 12;;
# 1.5 B, 2 x 1024 x 8: at most 1.03 of GPU only.                                                                       150 s
b) three b --model qwen2.5-1.5b --batch 2 --seq 1024 --grad-accum 8 --steps 6;;
# 3 B, 8 x 2048: the GPU is the bound, so nothing is recorded (replayed 0), and both rows take the same time.          150 s
g) row g 110 --system slide --model qwen2.5-3b --batch 8 --seq 2048 --steps 8 --warmup 14
   row g-off 110 --system slide --model qwen2.5-3b --batch 8 --seq 2048 --steps 8 --warmup 9 --slide '{"captured_blocks": false}';;
# 24 GiB, 1 x 2048 x 8: 3 B at most 1.2 s, 7.6 B at most 3.2 s, efficiency 0.9. Recordings are expected after step 3 (no
# activations are kept) and come in step 8. Four steps later memory is shared out again, and they come back by step 20. c3-6:
# with six host buffers for gradients instead of four.                                                               350 s
c3) row c3 120 --system slide --model qwen2.5-3b "${SMALL[@]}" --gpu-fraction "$F" --warmup 22;;
c3-6) row c3-6 120 --system slide --model qwen2.5-3b "${SMALL[@]}" --gpu-fraction "$F" --warmup 22 --slide '{"gradient_buffers": 6}';;
c3-off) row c3-off 110 --system slide --model qwen2.5-3b "${SMALL[@]}" --gpu-fraction "$F" --warmup 9 --slide '{"captured_blocks": false}';;
c7) row c7 200 --system slide --model qwen2.5-7b "${SMALL[@]}" --gpu-fraction "$F" --build host --warmup 16;;
# 24 GiB, 8 x 2048: the GPU is the bound, so nothing is recorded, and both rows take the same time.                     180 s
n) row n 120 --system slide --model qwen2.5-3b --batch 8 --seq 2048 --steps 8 --gpu-fraction "$F" --warmup 18
   row n-off 110 --system slide --model qwen2.5-3b --batch 8 --seq 2048 --steps 8 --gpu-fraction "$F" --warmup 9 --slide '{"captured_blocks": false}';;
# MoE, 10 blocks of Qwen3-30B-A3B, 24 GiB, 1 x 2048 x 4: at most 2.5 s. Host memory: 104 GB.                           150 s
m) row m 240 --system slide --model qwen3-30b-a3b-10-blocks --batch 1 --seq 2048 --grad-accum 4 --steps 6 --gpu-fraction "$F" --build host --warmup 9;;
# The rates of this host's memory and link, with nothing beside them, by which c3, c7 and m are judged. The last row of a call: the engine
# reads what it keeps.                                                                                                  40 s
h) limited 100 python3 benchmarks/ceilings.py --refresh | tee "$OUT/recorded_h.json"; say h;;
# 0.5 B, 8 x 512 x 4: at most 1.03 of GPU only.                                                                         120 s
l) three l --model qwen2.5-0.5b --batch 8 --seq 512 --grad-accum 4 --steps 8;;
# Stock, 3 B, 1 x 2048 x 8: 14.5 s on an H200. DeepSpeed compiles its CPU Adam once.                                   150 s
s) row s 200 --system stock --model qwen2.5-3b "${SMALL[@]}" --warmup 2 --steps 3;;
# Compiled, 3 B, 4 x 2048: DS-Slide beside plain torch and stock. Each layer, which is compiled once for all 36. w-model:
# engine.compile(). The whole graph of plain torch took more than 150 s to compile on 16 cores of an H200's host.   350 s
w) C=(--model qwen2.5-3b --batch 4 --seq 2048 --steps 5 --checkpointing none)
   row w 120 --system slide "${C[@]}" --compile layers --warmup 10
   row w-gpu 120 --system gpu-only "${C[@]}" --compile layers --warmup 3
   row w-model 150 --system slide "${C[@]}" --compile model --warmup 10
   row w-stock 240 --system stock "${C[@]}" --compile layers --warmup 3 --checkpointing non-reentrant;;
esac; done
