"""Python imports this module at its start, where this folder is on PYTHONPATH: in pytest and in every process that a
test of DeepSpeed starts. It adds the key "ds_slide" to every config of ZeRO stage 3 that DeepSpeed parses.

On the CPU accelerator it also makes the current device "cpu", which is "0" there and no device to torch, and drops the
device numbers that tests give to DistributedDataParallel: most of what compares with DDP would not run otherwise.

SLIDE_UPSTREAM is "slide", or "stock" for the same without the key. Each such config adds a byte to the file
SLIDE_UPSTREAM_SEEN, by which the plugin knows which tests are about stage 3.
"""

import functools
import importlib.abc
import os
import sys

CONFIG_MODULE = "deepspeed.runtime.config"


class _ConfigFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps DeepSpeedConfig when its module has been loaded."""

    def find_spec(self, fullname, _path, _target=None):
        if fullname != CONFIG_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_and_wrap(module):
            load(module)
            _wrap(module.DeepSpeedConfig)
            if os.environ.get("DS_ACCELERATOR") == "cpu":
                _with_cpu_devices()

        spec.loader.exec_module = load_and_wrap
        return spec


def _wrap(config_class):
    original = config_class.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raw = self._param_dict
        if int(self.zero_optimization_stage) != 3 or raw.get("ds_slide") == {"enabled": False}:
            return
        with open(os.environ["SLIDE_UPSTREAM_SEEN"], "ab") as seen:
            seen.write(b".")
        if os.environ["SLIDE_UPSTREAM"] == "slide":
            # In place: `deepspeed.initialize` hands this dictionary to the engine, too.
            raw.setdefault("ds_slide", {"enabled": True})

    config_class.__init__ = __init__


def _with_cpu_devices():
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self, module, device_ids=None, output_device=None, *args, **kwargs):  # noqa: ARG001
        original(self, module, None, None, *args, **kwargs)

    DistributedDataParallel.__init__ = __init__
    CPU_Accelerator.current_device = lambda self: "cpu"  # noqa: ARG005


if "SLIDE_UPSTREAM" in os.environ:
    import importlib.util

    sys.meta_path.insert(0, _ConfigFinder())
