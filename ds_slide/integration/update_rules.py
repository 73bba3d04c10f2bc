"""Which optimizer is updated by which rule. A new rule gets a line in `OPTIMIZERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.rule import UpdateRule


@dataclass(frozen=True)
class Optimizers:
    """Optimizers that one module of rules updates. `json_names`: `optimizer.type`, as DeepSpeed's parser leaves it (it
    writes its own names small). `classes`: (package, class): a subclass may change the update, so the type must be
    exact. `rule`: of an optimizer object; of None where only its name is known."""

    name: str
    json_names: tuple[str, ...]
    classes: tuple[tuple[str, str], ...]
    rule: Callable[[Any], UpdateRule]


# Imported when they are used, because the modules of rules define Triton kernels, and importing Triton takes a second.


def _lion(_optimizer: Any) -> UpdateRule:
    from ds_slide.optim.lion import LION

    return LION


def _sgd(optimizer: Any) -> UpdateRule:
    from ds_slide.optim import sgd

    return sgd.SGD_MOMENTUM if optimizer is None else sgd.rule_of(optimizer)


OPTIMIZERS = (
    Optimizers(
        "Adam",
        ("adamw", "adam"),
        (("deepspeed", "DeepSpeedCPUAdam"), ("deepspeed", "FusedAdam"), ("torch", "Adam"), ("torch", "AdamW")),
        lambda _optimizer: ADAMW,
    ),
    Optimizers("Lion", ("lion",), (("deepspeed", "DeepSpeedCPULion"), ("deepspeed", "FusedLion")), _lion),
    Optimizers("SGD", ("SGD",), (("torch", "SGD"),), _sgd),
)


def known_as(json_name: str) -> Optimizers | None:
    """The optimizers that `optimizer.type` names."""
    return next((known for known in OPTIMIZERS if json_name in known.json_names), None)


def known(optimizer: Any) -> Optimizers | None:
    """The optimizers that an optimizer object is one of."""
    kind = type(optimizer)
    own = (kind.__module__.partition(".")[0], kind.__name__)
    return next((known for known in OPTIMIZERS if own in known.classes), None)


def rule_of(optimizer: Any) -> UpdateRule:
    """The rule of an optimizer that the contract has let pass."""
    found = known(optimizer)
    assert found is not None
    return found.rule(optimizer)


def asked_for(json_name: str | None, client_optimizer: Any) -> UpdateRule | None:
    """The rule of the optimizer that a JSON or a script asks for; None where there is none, or it is not known yet."""
    if client_optimizer is None:
        found = None if json_name is None else known_as(json_name)
        return None if found is None else found.rule(None)
    found = known(client_optimizer)
    return None if found is None else found.rule(client_optimizer)


def names() -> str:
    """All optimizers, as the end of a sentence that begins with "updates with"."""
    *others, last = (known.name for known in OPTIMIZERS)
    return f"{', '.join(others)} and {last}" if others else last


def classes() -> str:
    """All classes, to choose from."""
    *others, last = (
        f"torch.optim.{name}" if package == "torch" else name for known in OPTIMIZERS for package, name in known.classes
    )
    return f"{', '.join(others)} or {last}"


def json_names() -> str:
    """All values of `optimizer.type`, to choose from."""
    *others, last = (f'"{name}"' for known in OPTIMIZERS for name in known.json_names)
    return f"{', '.join(others)} or {last}"
