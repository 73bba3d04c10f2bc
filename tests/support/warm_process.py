"""Imports what training scripts import, then runs each script that it is asked for in a fork, for warm.py.

Reads {"script": path, ...} and {"reap": pid}, one a line, from stdin, and answers with a process or an exit code. A
script is the main module of its fork and ends through the interpreter's exit. The fork happens before there is any
thread.
"""

import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import quick_bf16
from forking import ask_cpu_once, require_one_thread

MODULES = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "ds_slide.integration.checkpoint_save",
    "ds_slide.integration.parameter_offload",
    "ds_slide.integration.optimizer",
    "ds_slide.integration.selfcheck",
    "pytest",
    "setuptools",
    "torch._dynamo",
    "torch.utils.cpp_extension",
    "transformers.models.llama.modeling_llama",
)


def become(request):
    """Make this process what `python SCRIPT ARGUMENTS` would be, with its output in a file."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environment"])
    script = Path(request["script"])
    sys.argv = [str(script), *request["arguments"]]
    sys.path[0] = str(script.parent)
    main = vars(sys.modules["__main__"])
    main["__file__"] = str(script)
    exec(compile(script.read_bytes(), script, "exec"), main)


def main():
    quick_bf16.use()
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("deepspeed.accelerator").get_accelerator().create_op_builder("ShareMemCommBuilder").load(
        False
    )
    ask_cpu_once()
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, all that was made here
    require_one_thread()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            print(os.waitstatus_to_exitcode(status), file=answers)
        elif child := os.fork():
            print(child, file=answers)
        else:
            answers.close()
            become(request)
            return


if __name__ == "__main__":
    main()
