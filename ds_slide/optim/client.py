"""A client's own `torch.optim.Optimizer` as an update rule: one copy of it for each unit, which steps on the CPU.

The copy has the class, the parameter groups and the attributes of the client's object. Its parameters are stand-ins:
fp32 tensors with the shape of the parameter (of this rank's flat piece of it, with several ranks), which have memory
only while the copy steps. So what an optimizer counts in its groups or in itself advances once a step in each copy, as
it does in plain torch.

An optimizer whose step for one parameter depends on another parameter would give other results in copies. `trial`
finds that out, together with everything else that cannot be read from a class.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.optim.rule import Member, UpdateRule

Settings = Mapping[str, Any]
"""A parameter group without its parameters."""

_REFERENCE = "ds_slide parameter"


@functools.cache
def _attributes_of_all() -> frozenset[str]:
    """Return the attributes that every optimizer of torch has."""
    # Not when this module is imported: an optimizer imports torch._dynamo, which fails inside of `deepspeed.zero.Init`.
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))


@dataclass(frozen=True, eq=False)
class ClientHyper:
    """The settings of one parameter group in one update. ``step`` is the number of this update, 1 at the first."""

    rule: ClientRule
    settings: Settings
    step: int = 1
    kernel: str = ""
    two_passes: bool = False

    def constants(self, grad_scale: float = 1.0) -> tuple[float, ...]:
        return (grad_scale,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientHyper) and self.step == other.step and same(self.settings, other.settings)

    def __hash__(self) -> int:
        return hash(self.step)


@dataclass(frozen=True)
class ClientRule(UpdateRule):
    """The rule of a client's optimizer. Its state buffers are the masters' only; `UnitOptimizer` has the states."""

    optimizer: torch.optim.Optimizer | None = field(default=None, compare=False)
    measured: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict, compare=False)

    def beside(self, members: Sequence[Member]) -> int:
        """Return the bytes that the optimizer keeps for `members`. Each shape has had two steps, of zeros."""
        return sum(self._bytes_of(member) for member in members)

    def _bytes_of(self, member: Member) -> int:
        key = (member.group, member.shape)
        if key not in self.measured:
            unit = self.of_unit([member])
            gradient = torch.full(member.shape, 1e-3)
            for _ in range(2):
                unit.step([torch.zeros(member.shape)], [gradient], {})
            self.measured[key] = unit.nbytes()
        return self.measured[key]

    def of_unit(self, members: Sequence[Member]) -> UnitOptimizer:
        """Return the copy of the optimizer for `members`."""
        assert self.optimizer is not None
        return UnitOptimizer(self.optimizer, members)


def client_rule(optimizer: torch.optim.Optimizer) -> ClientRule:
    """Return the rule of a client's optimizer."""
    kind = type(optimizer)
    rule: ClientRule

    def hyper_of(group: Settings, step: int, _optimizer: Any) -> ClientHyper:
        return ClientHyper(rule, _settings(group), step)

    rule = ClientRule(
        name=f"{kind.__module__}.{kind.__qualname__}",
        states=(),
        state_dtypes=("fp32",),
        hyper_of=hyper_of,
        reference_step=_not_by_elements,
        gpu_step=_not_by_elements,
        problems=refusals,
        whole_units=True,
        optimizer=optimizer,
    )
    return rule


def _not_by_elements(*_arguments: Any) -> Any:
    raise AssertionError("a client's optimizer steps over whole parameters on the CPU")


class UnitOptimizer:
    """A copy of the client's optimizer for the parameters of one unit. `runtime` gives it memory to step on."""

    def __init__(self, client: torch.optim.Optimizer, members: Sequence[Member]) -> None:
        self.members = list(members)
        self._stand_ins = [_stand_in(member) for member in members]
        self._groups = sorted({member.group for member in members})
        own = {id(member.parameter): each for member, each in zip(members, self._stand_ins, strict=True)}
        self._copy: torch.optim.Optimizer = object.__new__(type(client))
        self._own_attributes = frozenset(vars(client)) - _attributes_of_all() - {"step"}
        for name, value in vars(client).items():
            if name not in ("param_groups", "state", "step"):  # a scheduler puts "step" there, to count its calls
                self._copy.__dict__[name] = _copied(value, own)
        self._copy.param_groups = [self._group(client.param_groups[index], index) for index in self._groups]
        self._copy.state = defaultdict(dict)
        # What the client's constructor has made for a parameter already, as Adagrad's does.
        for member, each in zip(members, self._stand_ins, strict=True):
            if made := client.state.get(member.parameter):
                self._copy.state[each] = {key: _as_seen(value, member) for key, value in made.items()}
        self._given: dict[int, Settings] = {index: _settings(client.param_groups[index]) for index in self._groups}

    def _group(self, group: Mapping[str, Any], index: int) -> dict[str, Any]:
        params = [each for member, each in zip(self.members, self._stand_ins, strict=True) if member.group == index]
        return {**_copied(_settings(group), {}), "params": params}

    def step(
        self,
        masters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        settings: Mapping[int, Settings],
    ) -> None:
        """Do one step on ``masters`` in place. Both are fp32, in the members' order and shapes; a member without a
        gradient has no step. ``settings``: of the groups that the client may have changed since the last step."""
        self._take(settings)
        for each, master, gradient in zip(self._stand_ins, masters, gradients, strict=True):
            each.data, each.grad = master, gradient
        try:
            self._copy.step()
            for each, master in zip(self._stand_ins, masters, strict=True):
                if each.data_ptr() != master.data_ptr():  # an optimizer may put a new tensor in its place
                    master.copy_(each.data)
        finally:
            for each in self._stand_ins:
                each.data, each.grad = torch.empty(0), None

    def _take(self, settings: Mapping[int, Settings]) -> None:
        """Set what the client has changed. What the optimizer has written to its groups itself stays."""
        for group, index in zip(self._copy.param_groups, self._groups, strict=True):
            if (new := settings.get(index)) is None:
                continue
            old = self._given[index]
            group.update({key: _copied(value, {}) for key, value in new.items() if not same(value, old.get(key))})
            self._given[index] = new

    @property
    def settings(self) -> list[Settings]:
        """The parameter groups of the copy."""
        return [_settings(group) for group in self._copy.param_groups]

    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(each.numel() * each.element_size() for each in _tensors(self._states()))

    def _states(self) -> list[Any]:
        return [self._copy.state.get(each, {}) for each in self._stand_ins]

    def content(self) -> dict[str, Any]:
        """Return everything that the next step depends on, but the masters."""
        attributes = {name: _copied(vars(self._copy)[name], self._references(True)) for name in self._own_attributes}
        return {
            "states": {member.name: dict(own) for member, own in zip(self.members, self._states(), strict=True)},
            "groups": self.settings,
            "given": [self._given[index] for index in self._groups],
            "attributes": {name: value for name, value in attributes.items() if _is_plain(value)},
        }

    def load(self, content: Mapping[str, Any]) -> None:
        """Set what `content` has returned, in an optimizer of the same class for members of the same names."""
        for member, each in zip(self.members, self._stand_ins, strict=True):
            self._copy.state[each] = _copied(content["states"][member.name], {})
        for group, index, own, given in zip(
            self._copy.param_groups, self._groups, content["groups"], content["given"], strict=True
        ):
            group.update(_copied(own, {}))
            self._given[index] = _copied(given, {})
        for name in self._own_attributes & content["attributes"].keys():
            self._copy.__dict__[name] = _copied(content["attributes"][name], self._references(False))

    def _references(self, saving: bool) -> dict[Any, Any]:
        """Return what stands for a parameter in a file, or else the parameter that such a reference stands for."""
        pairs = [((_REFERENCE, member.name), each) for member, each in zip(self.members, self._stand_ins, strict=True)]
        return {id(each): name for name, each in pairs} if saving else dict(pairs)


# ----------------------------------------------------------------------------------------------------------------------
# Copies: plain data is copied, and other objects are shared.


def _stand_in(member: Member) -> nn.Parameter:
    """Return an fp32 parameter with no memory, and with the marks that a script has put on the parameter."""
    made = nn.Parameter(torch.empty(0))
    for name, value in vars(member.parameter).items():
        if not name.startswith(("ds_", "_")) and isinstance(value, bool | int | float | str):
            setattr(made, name, value)
    return made


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value, {}) for key, value in group.items() if key != "params"}


def _copied(value: Any, replaced: Mapping[Any, Any]) -> Any:
    """Return a copy of plain data, and any other object itself. `replaced`: what comes in the place of parameters, by
    their `id`, and of references to parameters."""
    if isinstance(value, nn.Parameter):
        return replaced.get(id(value), value)
    if type(value) is tuple and len(value) == 2 and value[0] == _REFERENCE:
        return replaced.get(value, value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        made = copy.copy(value)
        made.clear()
        # Of a dictionary by parameters, only the unit's own are copied.
        own = ((k, v) for k, v in value.items() if not isinstance(k, nn.Parameter) or id(k) in replaced)
        made.update({_copied(key, replaced): _copied(each, replaced) for key, each in own})
        return made
    if type(value) in (list, set, tuple):
        return type(value)(_copied(each, replaced) for each in value)
    return value


def _as_seen(value: Any, member: Member) -> Any:
    """Return a state that the client's constructor has made, for what the optimizer sees of the parameter."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not value.is_floating_point():
        return _copied(value, {})
    if tuple(value.shape) == member.shape:
        return value.detach().float().clone()
    first = value.reshape(-1)[:1]
    if value.numel() and bool((value == first[0]).all()):  # the same number everywhere, so for every piece
        return first.float().expand(member.shape).clone()
    raise SlideError(
        f"the optimizer has a state {list(value.shape)} for {member.name}, made before deepspeed.initialize, of which "
        f"this rank needs {list(member.shape)}; give deepspeed.initialize an optimizer that has not stepped"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if hasattr(value, "__tensor_flatten__"):  # a tensor made of tensors, such as torchao's
        yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def same(left: Any, right: Any) -> bool:
    """Whether two settings are equal, tensors by their numbers."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    return type(left) is type(right) and bool(left == right)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused: by the class, and by a trial on a few small tensors.


def refusals(optimizer: Any) -> Iterator[str]:
    """Yield a sentence for each property of the object that a copy for each unit cannot have."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        yield f"{name} needs a closure in step(), which computes the loss again, and ZeRO-3 has none; use another one"
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        yield (
            f"{name} has a train() and an eval() of its own, which exchange the weights for others, but DS-Slide has "
            "them on another device; use an optimizer without, such as torch.optim.AdamW with a schedule"
        )
    if kind is torch.optim.SparseAdam:
        yield f"{name} is for sparse gradients, but DS-Slide makes dense ones of them; use torch.optim.AdamW"
    if kind.__module__.partition(".")[0] == "deepspeed":
        yield (
            f"{name} steps with a compiled kernel of its own over DeepSpeed's partitions; use the optimizer of torch "
            "with the same rule, such as torch.optim.Adagrad"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield (
            f"{name} has hooks on its step, which would run once for each unit; remove them, and do their work after "
            "engine.step()"
        )
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        yield f"{name} has a step() that the script has put in the object; put it in a subclass instead"


@dataclass(frozen=True)
class Trial:
    """What a few steps on small tensors have shown."""

    problem: str = ""
    by_shape: bool = False
    """Whether a parameter's shape changes the step."""


_STEPS = 3


def trial(rule: ClientRule) -> Trial:
    """Step over small tensors: all of them together, one by one, and flat. Equal results show that the optimizer
    treats parameters, and elements, by themselves. Raises nothing, and leaves torch's random numbers as they were."""
    assert rule.optimizer is not None
    members = [
        Member(f"{index}.{number}", parameter, index, shape)
        for index, group in enumerate(rule.optimizer.param_groups)
        for number, (parameter, shape) in enumerate(_small(group["params"]))
    ]
    before = torch.get_rng_state()
    try:
        together = _stepped(rule, members)
        draws = not torch.equal(before, torch.get_rng_state())
        apart = [_stepped(rule, [member]) for member in members]
        flat = _stepped(rule, [member._replace(shape=(_numel(member.shape),)) for member in members])
    except Exception as error:  # whatever a client's code raises
        return Trial(f"cannot step over fp32 tensors in host memory ({type(error).__name__}: {error}); use another one")
    finally:
        torch.set_rng_state(before)
    if draws:
        return Trial(
            "draws from torch's random generator in its step, which would mix with the model's dropout; use one that "
            "rounds to nearest"
        )
    alone = _Stepped([each.masters[0] for each in apart], [each.groups[0] for each in apart])
    of_member = [together.groups[sorted({each.group for each in members}).index(each.group)] for each in members]
    if not (_equal(together.masters, alone.masters) and all(map(same, of_member, alone.groups))):
        return Trial(
            "looks at all parameters in the step of each (such as a norm, or a learning rate of its own for the whole "
            "model), but DS-Slide steps one unit at a time; use one that treats each parameter by itself"
        )
    return Trial(by_shape=not _equal(together.masters, flat.masters))


class _Stepped(NamedTuple):
    masters: Sequence[torch.Tensor]
    groups: Sequence[Settings]


def _stepped(rule: ClientRule, members: Sequence[Member]) -> _Stepped:
    unit = rule.of_unit(members)
    generator = torch.Generator().manual_seed(0)
    masters, gradients = [], []
    for member in members:
        seed = sum(ord(letter) * place for place, letter in enumerate(member.name, 1))
        generator.manual_seed(seed)
        masters.append(torch.randn(_numel(member.shape), generator=generator).view(member.shape))
        gradients.append(torch.randn(_numel(member.shape), generator=generator).view(member.shape))
    for _ in range(_STEPS):
        # Contiguous copies: an optimizer may write to its gradients.
        unit.step(masters, [gradient.clone() for gradient in gradients], {})
    return _Stepped(masters, unit.settings)


def _small(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Return two parameters for each number of dimensions among `parameters`, and small shapes for them."""
    found: dict[int, list[tuple[nn.Parameter, tuple[int, ...]]]] = defaultdict(list)
    for parameter in parameters:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        limits = (3,) * max(len(shape) - 2, 0) + ((24,) if len(shape) == 1 else (16, 24))
        found[len(shape)].append((parameter, tuple(map(min, shape, limits))))
    return [each for same_kind in found.values() for each in sorted(same_kind, key=_least_last)[:2]]


def _least_last(each: tuple[nn.Parameter, tuple[int, ...]]) -> int:
    return -_numel(each[1])


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one.reshape(-1), other.reshape(-1)) for one, other in zip(left, right, strict=True))
