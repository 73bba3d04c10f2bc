"""How DS-Slide gets into a process that never names it: the `torch.backends` entry point of this package.

torch calls that entry point at the end of `import torch`, so every script that trains with DeepSpeed calls it. It must
cost nothing there (0.2 ms of 2.5 s), so this module imports the standard library only, and it must not fail, because an
exception in an entry point breaks `import torch`. All it does is to leave a finder on `sys.meta_path` that waits for
`deepspeed.runtime.engine` and then wraps the engine class; what that does is in integration/activation.py. It waits
as well for the module of accelerate that reads the JSON for Trainer, which may be before DeepSpeed is imported.

Why not a `.pth` file, the other way in: Python reads `.pth` files in site directories only (not in a `--target` folder
on PYTHONPATH), an editable install does not place extra ones, and every Python process of the environment pays for it.
Package metadata is found wherever the package is. The price: TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it off with all
other backends; `import ds_slide` and `python -m ds_slide.run` still work then.

Why the engine module and not `deepspeed` itself: in a script whose first import is deepspeed, torch (and with it this
module) is loaded from within `deepspeed/__init__.py`, when a finder for `deepspeed` would come too late.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENGINE_MODULE = "deepspeed.runtime.engine"
HF_MODULE = "accelerate.utils.deepspeed"
DISABLE_VARIABLE = "DS_SLIDE_DISABLE"


def install_hook() -> None:
    """Make DeepSpeed engines obey the "ds_slide" key, now or as soon as DeepSpeed is imported; idempotent.

    DS_SLIDE_DISABLE=1 in the environment keeps DS-Slide out of the process altogether.
    """
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return
    waiting = []
    for name in (HF_MODULE, ENGINE_MODULE):
        if _is_loaded(name):
            _install(name)
        else:
            waiting.append(name)
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(waiting))


class _Finder:
    """Finds nothing itself: has the other finders find the modules and adds a step after their loading."""

    def __init__(self, waiting: list[str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in list(sys.meta_path):
            find_spec = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                self._install_after_loading(spec, fullname)
                return spec
        return None

    def _install_after_loading(self, spec: ModuleSpec, name: str) -> None:
        loader: Any = spec.loader
        load: Callable[[ModuleType], None] = loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            # Not before: a load that fails may be tried again.
            if name in self._waiting:
                self._waiting.remove(name)
            if not self._waiting and self in sys.meta_path:
                sys.meta_path.remove(self)
            _install(name)

        # On the instance, so that the module keeps its real loader (inspect and importlib.resources ask for it).
        try:
            loader.exec_module = load_and_install
        except AttributeError:
            _warn(f"the loader {loader!r} cannot be extended; put `import ds_slide` after `import deepspeed`")


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _install(name: str) -> None:
    try:
        room = "early" if name == HF_MODULE else "activation"
        importlib.import_module(f"ds_slide.integration.{room}").install(sys.modules[name])
    except Exception as error:  # off means off: whatever is wrong here, the module itself must import as ever
        _warn(f"installing it into {name} failed with {error!r}")


def _warn(reason: str) -> None:
    warnings.warn(f"DS-Slide is not active in this process: {reason}", RuntimeWarning, stacklevel=2)
