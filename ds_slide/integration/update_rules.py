"""The update rule of each optimizer. A new rule gets a line in `OPTIMIZERS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_slide.integration.selfcheck import replaced
from ds_slide.optim import muon_batch
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.client import client_rule
from ds_slide.optim.muon import MuonRule
from ds_slide.optim.rule import UpdateRule
from ds_slide.report.log import log


@dataclass(frozen=True)
class Optimizers:
    """Optimizers that one module of rules updates. `json_names`: `optimizer.type`, as DeepSpeed's parser leaves it (it
    writes its own names small). `classes`: (package, class): a subclass may change the update, so the type must be
    exact. `rule`: returns the rule of an optimizer object, or of None where only its name is known."""

    name: str
    json_names: tuple[str, ...]
    classes: tuple[tuple[str, str], ...]
    rule: Callable[[Any], UpdateRule]


# The modules of rules are imported when they are used: they define Triton kernels, and importing Triton takes a second.


def _lion(_optimizer: Any) -> UpdateRule:
    from ds_slide.optim.lion import LION

    return LION


def _sgd(optimizer: Any) -> UpdateRule:
    from ds_slide.optim import sgd

    return sgd.SGD_MOMENTUM if optimizer is None else sgd.rule_of(optimizer)


def _muon(optimizer: Any) -> UpdateRule:
    from ds_slide.optim.muon import muon_rule

    groups = [] if optimizer is None else optimizer.param_groups
    adamw = frozenset(index for index, group in enumerate(groups) if not group["use_muon"])
    parameters = (parameter for group in groups for parameter in group["params"])
    heads = {each: each.muon_num_heads for each in parameters if getattr(each, "muon_num_heads", None)}
    method: Any = next((group["ns_method"] for group in groups if group["use_muon"] and "ns_method" in group), "gram")
    return muon_rule(adamw, _product_dtypes(), heads, method)


def has_muon_kernel(wanted: Literal["auto"] | bool, rule: UpdateRule | None) -> bool:
    """Return whether a kernel makes Muon's symmetric products (`ds_slide.muon_kernel`)."""
    if not isinstance(rule, MuonRule) or wanted is False:
        return False
    found = muon_batch.has_kernel(torch.device(get_accelerator().current_device_name()))
    if wanted is True and not found:
        log.warning("ds_slide.muon_kernel is true, but its kernel needs a Hopper GPU and Triton 3.4: torch multiplies")
    return found


def _product_dtypes() -> dict[str, torch.dtype]:
    """Return the data type of the products of each `ns_method`, as in DeepSpeed's `ns_compute_dtype`, whose module
    takes seconds to import."""
    accelerator = get_accelerator()
    return {
        "gram": torch.float16 if accelerator.is_fp16_supported() else torch.float32,
        "standard": torch.bfloat16 if accelerator.is_bf16_supported() else torch.float32,
    }


OPTIMIZERS = (
    Optimizers(
        "Adam",
        ("adamw", "adam"),
        (("deepspeed", "DeepSpeedCPUAdam"), ("deepspeed", "FusedAdam"), ("torch", "Adam"), ("torch", "AdamW")),
        lambda _optimizer: ADAMW,
    ),
    Optimizers("Lion", ("lion",), (("deepspeed", "DeepSpeedCPULion"), ("deepspeed", "FusedLion")), _lion),
    Optimizers("SGD", ("SGD",), (("torch", "SGD"),), _sgd),
    Optimizers("Muon", ("muon",), (("deepspeed", "MuonWithAuxAdam"),), _muon),
)


def known_as(json_name: str) -> Optimizers | None:
    """Return the optimizers that `optimizer.type` names; None where it names none of them."""
    return next((known for known in OPTIMIZERS if json_name in known.json_names), None)


def known(optimizer: Any) -> Optimizers | None:
    """Return the optimizers with the class of an optimizer object; None where there are none."""
    kind = type(optimizer)
    own = (kind.__module__.partition(".")[0], kind.__name__)
    return next((known for known in OPTIMIZERS if own in known.classes), None)


def rule_of(optimizer: Any) -> UpdateRule:
    """Return the rule of an optimizer object. An optimizer without kernels of ours steps by itself."""
    found = known(optimizer)
    return client_rule(optimizer) if found is None else found.rule(optimizer)


def asked_for(json_name: str | None, client_optimizer: Any) -> UpdateRule | None:
    """Return the rule of the optimizer that a JSON or a script asks for; None where there is none, or not yet."""
    if isinstance(client_optimizer, torch.optim.Optimizer):
        return rule_of(client_optimizer)
    found = None if json_name is None or client_optimizer is not None else known_as(json_name)
    return None if found is None else found.rule(None)


def with_groups(
    rule: UpdateRule, model: nn.Module, settings: Mapping[str, Any] | None
) -> tuple[UpdateRule, dict[nn.Parameter, int]]:
    """Return the rule and the groups of the trainable parameters that an optimizer would have, as DeepSpeed makes it
    from the JSON: one group, and a second one beside Muon's. The parameters have DeepSpeed's marks. `settings`:
    "optimizer.params"."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if rule.name != "Muon":
        return rule, dict.fromkeys(trainable, 0)
    marked = [parameter for parameter in trainable if getattr(parameter, "use_muon", False)]
    group_of = dict.fromkeys(trainable, 1) | dict.fromkeys(marked, 0)
    groups = [{**(settings or {}), "use_muon": True, "params": marked}, {"use_muon": False, "params": []}]
    return _muon(SimpleNamespace(param_groups=groups)), group_of


def has_name(json_name: str) -> bool:
    """Whether `optimizer.type` has a rule here, or names a class of torch.optim, which DeepSpeed makes."""
    kind = getattr(torch.optim, json_name, None)
    return known_as(json_name) is not None or (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer))


def json_names() -> str:
    """Return all values of `optimizer.type`, to choose from."""
    return ", ".join(f'"{name}"' for known in OPTIMIZERS for name in known.json_names)


# ----------------------------------------------------------------------------------------------------------------------
# DeepSpeed's optimizers without their compiled kernels.
#
# With an Adam or a Lion in the JSON, DeepSpeed builds its own optimizer, and the constructor compiles an op:
# about 50 s on two cores, and a failure without a compiler. Here the object only carries hyper-parameters, so the op
# builder is replaced for the length of the construction; type, parameter groups and attributes are the real ones.
#
# accelerate turns a script's Adam into a DeepSpeedCPUAdam before it calls `initialize`. Where its config has the key,
# the kernels of that optimizer are compiled at their first call, which never comes after `initialize`.

_BUILDERS = (
    ("deepspeed.ops.adam.cpu_adam", "CPUAdamBuilder"),
    ("deepspeed.ops.adam.fused_adam", "FusedAdamBuilder"),
    ("deepspeed.ops.lion.cpu_lion", "CPULionBuilder"),
    ("deepspeed.ops.lion.fused_lion", "FusedLionBuilder"),
)


class _NoKernels:
    """Op builder and op in one: it compiles and creates nothing, and has no kernel that could be called by mistake."""

    multi_tensor_adam = multi_tensor_lion = None

    def load(self) -> _NoKernels:
        return self

    def create_adam(self, *args: Any) -> None:
        """DeepSpeedCPUAdam makes its C++ object here."""

    def destroy_adam(self, *args: Any) -> None:
        """DeepSpeedCPUAdam frees it here."""

    create_lion, destroy_lion = create_adam, destroy_adam


class _KernelsOnUse:
    """The op of one DeepSpeedCPUAdam, compiled when it is first called. `builder`: stock's builder of the op."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._created: tuple[Any, ...] = ()
        self._op: Any = None

    def load(self) -> _KernelsOnUse:
        return self

    def create_adam(self, *args: Any) -> None:
        self._created = args

    def destroy_adam(self, *args: Any) -> None:
        if self._op is not None:
            self._op.destroy_adam(*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for such names
            raise AttributeError(name)
        if self._op is None:
            op = self._builder.load()
            op.create_adam(*self._created)
            self._op = op
        return getattr(self._op, name)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let optimizers constructed inside have hyper-parameters and no kernels."""
    with ExitStack() as stack:
        for module_name, name in _BUILDERS:
            module = importlib.import_module(module_name)
            if hasattr(module, name):  # otherwise the op is compiled, as in stock
                stack.enter_context(replaced(module, name, _NoKernels))
        yield


@contextmanager
def kernels_on_use() -> Iterator[None]:
    """Let each DeepSpeedCPUAdam constructed inside compile its kernels when it first calls them."""
    from deepspeed.ops.adam import cpu_adam

    stock = getattr(cpu_adam, "CPUAdamBuilder", None)
    if stock is None:  # the op is compiled, as in stock
        yield
        return
    with replaced(cpu_adam, "CPUAdamBuilder", lambda: _KernelsOnUse(stock())):
        yield
