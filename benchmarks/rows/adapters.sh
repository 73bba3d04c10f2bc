#!/usr/bin/env bash
# Adapters on frozen bases, on one GPU of 80 GB. Run at the top of the repository, with DS-Slide, peft and bitsandbytes installed:
#     OUT=... bash benchmarks/rows/adapters.sh d1 a1 a2 b        # about 420 s
#     OUT=... bash benchmarks/rows/adapters.sh c1 c2             # about 360 s
#     OUT=... bash benchmarks/rows/adapters.sh d2 d3             # about 400 s
#     OUT=... bash benchmarks/rows/adapters.sh d4                # about 200 s
#     OUT=... bash benchmarks/rows/adapters.sh a3 e gpu          # about 310 s (and 60 to 100 s once for DeepSpeed's CPU Adam, if not built)
# Order of importance: d1 a1 a2 c1 b d2 a3 c2 d3 e. One JSON record a row in $OUT/adapters_*.jsonl, $OUT/lengths72.jsonl.
# Figures in comments: estimates of seconds in all / of the build, made before the first run.
: "${OUT:=out}"; mkdir -p "$OUT"
export THP_MEM_ALLOC_ENABLE=1   # torch asks for huge pages: fewer page faults while the weights go to host memory
T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
F=$(python3 -c "import torch; print(round(24 * 2**30 / torch.cuda.mem_get_info()[1], 4))"); say "24 GiB are $F of the card"
row() { # NAME SECONDS OPTIONS of step.py: one record in $OUT/adapters_NAME.jsonl, and a line of it here
  local name=$1 limit=$2 code; shift 2; rm -f "$OUT/adapters_$name.jsonl"
  timeout -k 5 "$limit" python3 benchmarks/step.py --adapter 16 --clip 1.0 "$@" --out "$OUT/adapters_$name.jsonl" > "$OUT/$name.log" 2>&1
  code=$?; [ $code = 0 ] || { echo "FAILED $name ($code)"; tail -4 "$OUT/$name.log" | cut -c1-400; }
  [ -e "$OUT/adapters_$name.jsonl" ] && python3 - "$OUT/adapters_$name.jsonl" "$name" <<'P'
import json, sys
r = json.loads(open(sys.argv[1]).read().splitlines()[-1]); s = r["setting"]; g = lambda k: (r.get(k) or 0) / 1e9
print(f"{sys.argv[2]}: {s['system']} {s['model']} {s['base']} {s['targets']} {s['batch']}x{s['seq']} {r['status']} "
      f"{r.get('step_s', 0):.4f} s ({r.get('step_s_min', 0):.4f} to {r.get('step_s_max', 0):.4f}) {r.get('tokens_per_s', 0):.0f} tokens/s "
      f"bound {r.get('bound_s')} {r.get('bound_lane')} eff {r.get('efficiency')} GPU {g('gpu_peak_allocated_bytes'):.2f} GB "
      f"(init {g('gpu_peak_init_bytes'):.1f}) host {g('host_bytes'):.1f} peak {g('host_peak_bytes'):.1f} GB "
      f"init {r.get('init_s', 0):.0f} s losses {[round(x, 5) for x in r.get('losses', [])]} {r.get('device')} {r.get('error', '')[:200]}")
P
  say "$name"; return $code; }
[ $# -gt 0 ] || set -- d1 a1 a2 c1 b d2 a3 c2 d3 e
for row in "$@"; do case $row in
# 30 B-A3B bf16, 8 x 2048, LoRA on attention.                                                130 s / 40
d1) row d1 240 --system slide --model qwen3-30b-a3b --targets attention --batch 8 --seq 2048 --build host \
      --gpu-fraction $F --warmup 6 --steps 6;;
# 14 B nf4, 4 x 2048, DS-Slide.                                                               80 s / 15
a1) row a1 150 --system slide --model qwen2.5-14b --base nf4 --batch 4 --seq 2048 --build host \
      --gpu-fraction $F --warmup 9 --steps 8;;
# The same in plain torch, checkpointed, our kernels, the same 24 GiB.                        55 s / 8
a2) row a2 120 --system gpu-only --model qwen2.5-14b --base nf4 --batch 4 --seq 2048 --patch ours \
      --gpu-fraction $F --warmup 3 --steps 8;;
# 32 B bf16, 4 x 2048.                                                                       150 s / 45
b)  row b 260 --system slide --model qwen2.5-32b --batch 4 --seq 2048 --build host \
      --gpu-fraction $F --warmup 7 --steps 6;;
# 72 B nf4 with double quantisation, 4 x 2048.                                               180 s / 50
c1) row c1 300 --system slide --model qwen2.5-72b --base nf4-double --batch 4 --seq 2048 --build host \
      --gpu-fraction $F --warmup 6 --steps 4;;
# The same model, 30 steps of 2 x (64 to 4096) tokens, three evaluations and generations; the last step is 2 x 4096.  180 s / 50
c2) timeout -k 5 320 python3 benchmarks/lengths.py --case lora-72b --gib 24 --batch 2 --steps 30 \
      --out $OUT/lengths72.jsonl > $OUT/c2.log 2>&1; code=$?; tail -1 $OUT/c2.log | cut -c1-700; say "c2 $code";;
# 30 B-A3B, LoRA on attention and by target_parameters on all experts (643 M trained).        200 s / 50
d2) row d2 300 --system slide --model qwen3-30b-a3b --targets experts --batch 8 --seq 2048 --build host \
      --gpu-fraction $F --warmup 5 --steps 4;;
# The same with its experts in parts: the losses of d2.                                       200 s / 50
d4) row d4 300 --system slide --model qwen3-30b-a3b --targets experts --batch 8 --seq 2048 --build host \
      --gpu-fraction $F --warmup 5 --steps 4 --slide '{"experts": "256MiB"}';;
# Stock ZeRO-3 offload, LoRA on attention, on the whole card: its logits of 16,384 tokens alone are 30 GB. Its start
# moves all 61 GB to the GPU, which the whole card holds; host memory about 80 GB (powers of two).    200 s / 40
d3) row d3 330 --system stock --model qwen3-30b-a3b --targets attention --batch 8 --seq 2048 --build host \
      --warmup 2 --steps 3;;
# Stock, 14 B nf4, in 24 GiB from the end of its start on; if its 15 GB of logits do not fit, on the whole card.  110 s / 15, each
a3) row a3 200 --system stock --model qwen2.5-14b --base nf4 --batch 4 --seq 2048 --build host \
      --gpu-fraction $F --warmup 2 --steps 3 ||
      row a3-whole 200 --system stock --model qwen2.5-14b --base nf4 --batch 4 --seq 2048 --build host \
      --warmup 2 --steps 3;;
# int8 and fp8: losses of DS-Slide through two slots beside plain torch with the same kernels.   40 s each, four of them
e) for base in int8 fp8; do
    row e-$base 90 --system slide --model qwen2.5-1.5b --base $base --batch 2 --seq 512 --build host --lr 1e-4 \
      --slide '{"window": 2, "gpu_states": 0}' --warmup 2 --steps 8
    row e-$base-plain 90 --system gpu-only --model qwen2.5-1.5b --base $base --batch 2 --seq 512 --patch ours --lr 1e-4 \
      --warmup 2 --steps 8
   done;;
# The largest mixture in 4 bits that 125 GiB of host memory hold: 235 B-A22B, double quantisation, LoRA on attention, 1 x 2048
# and 4 x 2048. By the plan 113.8 GiB of host memory, and 4.1 s a step of 1 x 2048, which the link bounds.      400 s
f) row f 400 --system slide --model qwen3-235b-a22b --base nf4-double --targets attention --batch 1 --seq 2048 --build host \
      --gpu-fraction $F --warmup 5 --steps 4;;
f4) row f4 400 --system slide --model qwen3-235b-a22b --base nf4-double --targets attention --batch 4 --seq 2048 --build host \
      --gpu-fraction $F --warmup 5 --steps 4;;
# The GPU test of packed bases.                                                               45 s
gpu) timeout -k 5 200 python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short tests/gpu/test_packed.py > $OUT/gpu.log 2>&1
     tail -3 $OUT/gpu.log; say gpu;;
esac; done
