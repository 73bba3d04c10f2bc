"""`deepspeed.zero.Init` with parameters on NVMe: under DS-Slide they wait in host memory until the plan places them.

Stock would compile and start its own swapper at the first `zero.Init`, write every parameter to a file of its own and
leave that behind; DS-Slide would only read them back. Without the key "ds_slide" nothing changes.

The JSON may still have "auto" there: axolotl loads the model before it makes Trainer's TrainingArguments, which fill in
the numbers.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ds_slide.integration.as_written import as_written

_reads_its_json: ContextVar[bool] = ContextVar("zero.Init reads its JSON", default=False)


def install_zero_init(init_class: Any, slide_config: Callable[[Any], Any]) -> None:
    """Wrap the constructor of `deepspeed.runtime.zero.partition_parameters.Init`. `slide_config`: None means off."""
    original = init_class.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # reports it
            return
        for name in ("config_dict_or_path", "config"):
            raw = as_written(given.arguments.get(name))
            if raw is not None and slide_config(raw) is not None:
                from ds_slide.integration.early import check_json

                check_json(raw)
                given.arguments[name] = in_host_memory(raw)
                if given.arguments.get("remote_device") == "nvme":
                    given.arguments["remote_device"] = "cpu"
        with _reading():
            original(*given.args, **given.kwargs)

    init_class.__init__ = __init__


def reads_its_json() -> bool:
    """Whether this thread is in the constructor of `zero.Init`, so that values of the JSON may be filled in later."""
    return _reads_its_json.get()


@contextmanager
def _reading() -> Iterator[None]:
    token = _reads_its_json.set(True)
    try:
        yield
    finally:
        _reads_its_json.reset(token)


def in_host_memory(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` with `offload_param.device` "cpu" where it is "nvme"; the object given is not changed."""
    section = (config.get("zero_optimization") or {}).get("offload_param") or {}
    if section.get("device") != "nvme":
        return config
    changed = copy.deepcopy(dict(config))
    changed["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": section.get("pin_memory", False)}
    return changed
