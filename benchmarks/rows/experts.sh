#!/usr/bin/env bash
# Experts that move in parts, on one H100 (80 GB): two blocks of DeepSeek-V3's size (2 x 11.5 G parameters, 46 GB of
# host memory in bf16, 70 GB while they are placed), LoRA on attention, 1 x 512 tokens, torch limited to 16 GiB.
# Run at the top of the repository, with DS-Slide and peft installed. One process a row; results in $OUT.
#   row 1: the claim. Forward and backward of one layer = (forward_phase_s + backward_phase_s) / 2, at most 1.0 s.
#          92 GB over the link are 1.67 s at 55 GB/s for both layers.
#   row 1b: row 1 with LoRA on the experts themselves, too (`target_parameters`; 170 M trained).
#   row 2: the same with the script's checkpointing (the engine keeps the experts' results: no third fetch).
#   row 3: whole blocks on the whole card (slots of 46 GB): the losses of rows 1 to 3 should agree.
#   row 4: plain torch on the whole card, same weights: first losses agree to bf16 (DeepSpeed also casts fp32 buffers).
#   row 5: generation, 8 new tokens, with experts in parts (prints seconds a token and GB fetched a token).
# First: python3 -m pytest tests/gpu/test_experts.py -m gpu -q
set -u
OUT=${OUT:-out}; mkdir -p "$OUT"
fraction=$(python3 -c 'import torch; print(round(16 * 2**30 / torch.cuda.get_device_properties(0).total_memory, 4))')
common="--model deepseek-v3-2-blocks --adapter 16 --targets attention --batch 1 --seq 512 --build host --steps 6 --warmup 4 --out $OUT/experts.jsonl"
python3 benchmarks/step.py --system slide --checkpointing none --gpu-fraction "$fraction" $common
python3 benchmarks/step.py --system slide --checkpointing none --gpu-fraction "$fraction" $common --targets experts
python3 benchmarks/step.py --system slide --checkpointing non-reentrant --gpu-fraction "$fraction" $common
python3 benchmarks/step.py --system slide --checkpointing none $common --slide '{"experts": 0}'
python3 - <<'P'
import sys, torch
sys.path[:0] = ["benchmarks"]
import settings, shapes, step
setting, device = settings.Setting("gpu-only", model="deepseek-v3-2-blocks", adapter=16, targets="attention", batch=1, seq=512), torch.device("cuda", 0)
model = shapes.one_by_one(shapes._without_weights(setting.model), device, device, setting.seed)
model = shapes.with_adapters(model, setting.adapter, setting.targets, setting.seed).train()
losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in step.token_batches(setting, model.config.vocab_size, device)[:1]]
print("plain torch, the first loss:", losses, flush=True)
P
python3 - "$OUT/experts.jsonl" <<'P'
import json, sys
for line in open(sys.argv[1]):
    d = json.loads(line)
    if d.get("status") != "ok":
        print(d["setting"]["system"], d.get("status"), d.get("error")); continue
    both = d["forward_phase_s"] + d["backward_phase_s"]
    stats = d.get("slide_stats") or {}
    h2d = (stats.get("lanes") or {}).get("h2d") or {}
    rate = h2d["bytes"] / h2d["busy_s"] / 1e9 if h2d.get("busy_s") else 0
    print(f'{d["setting"]["system"]:9} {d["setting"]["checkpointing"]:14} a layer {both / 2:.3f} s  step {d["step_s"]:.3f} s  '
          f'GPU peak {(d["gpu_peak_reserved_bytes"] or 0) / 2**30:.1f} GiB reserved, {(d["gpu_peak_allocated_bytes"] or 0) / 2**30:.1f} allocated  '
          f'init {d["init_s"]:.0f} s  host peak {d["host_peak_bytes"] / 1e9:.0f} GB  h2d {h2d.get("bytes", 0) / 1e9:.1f} GB at {rate:.1f} GB/s  losses {[round(x, 4) for x in d["losses"][:4]]}')
P
python3 - "$fraction" <<'P'
import os, sys, time, torch
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
import deepspeed
sys.path[:0] = ["benchmarks"]
import shapes
torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]))
model = shapes.build_in_host_memory("deepseek-v3-2-blocks", torch.device("cuda", 0), 0).eval()
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": 10**9, "ds_slide": {"enabled": True},
          "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
meter = engine.optimizer.runtime.parts.context.recorder.meters["h2d"]
prompt = torch.arange(1, 17, device="cuda")[None]
with torch.no_grad():
    for new in (2, 10):
        torch.cuda.synchronize(); meter.take(); start = time.perf_counter()
        engine.module.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0)
        torch.cuda.synchronize()
        print(f"generation of {new} tokens: {time.perf_counter() - start:.3f} s, {meter.take()[1] / 1e9:.2f} GB up", flush=True)
engine.destroy()
P
