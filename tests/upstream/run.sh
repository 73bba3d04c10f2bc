#!/usr/bin/env bash
# Runs DeepSpeed's own unit tests with "ds_slide": {"enabled": true} in every engine of stage 3.
#
#     tests/upstream/run.sh CHECKOUT [-o FOLDER] [PYTEST ARGUMENTS OR FILES, from CHECKOUT/tests]
#
# CHECKOUT is DeepSpeed's repository at the version that is installed. What does not pass with the key runs again
# without it, to know what fails on stock, too. FOLDER (runs/upstream) keeps a line of JSON for each test, where a run
# that was ended goes on, and the summary. DS_ACCELERATOR is cpu unless it is set.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
checkout=$(cd "$1" && pwd); shift
out=$repository/runs/upstream
if [ "${1:-}" = "-o" ]; then mkdir -p "$2"; out=$(cd "$2" && pwd); shift 2; fi
mkdir -p "$out"
[ $# -gt 0 ] || set -- unit/runtime/zero unit/checkpoint unit/v1/zero unit/v1/half_precision unit/v1/pin_memory \
    unit/runtime/half_precision unit/runtime/test_ds_config_dict.py unit/runtime/test_ds_config_model.py \
    unit/runtime/test_ds_initialize.py unit/runtime/test_lr_schedulers.py unit/runtime/test_multi_output_model.py \
    unit/runtime/test_multiple_models.py unit/runtime/test_no_sync_ctxt.py unit/runtime/test_autocast.py unit/monitor

# Its conftest puts the checkout on sys.path, where its package would hide the one that is installed.
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cp -r "$checkout/tests" "$work/tests"
# Gloo gathers no tensors without dimensions: with them, what compares with DDP runs on the CPU, too.
sed -i 's/torch.tensor(1 if flag else 0, /torch.tensor([1 if flag else 0], /' "$work/tests/unit/common.py"
cd "$work/tests"
export PYTHONPATH="$here/injected:$repository${PYTHONPATH:+:$PYTHONPATH}"
# Without LOCAL_SIZE the CPU accelerator counts its sockets, and skips every test of more ranks.
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} LOCAL_SIZE=${LOCAL_SIZE:-4} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export DS_UNITTEST_TIMEOUT=${DS_UNITTEST_TIMEOUT:-200} SLIDE_UPSTREAM_SEEN="$work/seen"

# A test that hangs ends pytest; the next start of pytest goes on behind it.
pass() {  # $1: slide or stock
    local again="$work/again" status
    while :; do
        rm -f "$again"
        status=0
        SLIDE_UPSTREAM=$1 SLIDE_UPSTREAM_OUT="$out/$1.jsonl" SLIDE_UPSTREAM_AGAIN=$again python -m pytest \
            -p upstream_plugin -p no:cacheprovider -q --continue-on-collection-errors --tb=short --no-header \
            "${@:2}" >> "$out/$1.log" 2>&1 || status=$?
        [ -e "$again" ] && continue
        case $status in 0 | 1 | 5) return ;; *) tail -30 "$out/$1.log"; exit 1 ;; esac  # 1: failures, 5: nothing left
    done
}
touch "$out/slide.jsonl" "$out/stock.jsonl"
pass slide "$@"
python "$here/summary.py" --failed "$out/slide.jsonl" > "$work/only"
if [ -s "$work/only" ]; then
    export SLIDE_UPSTREAM_ONLY="$work/only"
    pass stock "$@"
fi
python "$here/summary.py" "$out/slide.jsonl" "$out/stock.jsonl" | tee "$out/summary.md"
