"""A running engine made from DeepSpeed's arguments: structure, layouts, plan, runtime, kernels, precision."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import (
    get_comm_dtype,
    get_default_autocast_lower_precision_modules,
    has_comm_dtype,
)
from deepspeed.utils import z3_leaf_module
from deepspeed.utils.groups import _get_sequence_parallel_world_size
from torch import nn

from ds_slide.compression.lsp.codec import LEAST_SUBSPACE
from ds_slide.config import CompressionConfig, SlideConfig
from ds_slide.errors import SlideConfigError
from ds_slide.integration.divided_tensors import DividedTensors
from ds_slide.integration.partitions import DeepSpeedClients
from ds_slide.integration.refused import REMOVE
from ds_slide.model.experts import find_experts
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.model.structure import Precision, Precisions, UnitSpec, find_structure, parameter_numel, parameter_shape
from ds_slide.patching.adapters import adapt_parametrized
from ds_slide.patching.apply import Replaced, apply_kernels
from ds_slide.patching.experts import bring_experts, stream_experts
from ds_slide.patching.head import stream_head
from ds_slide.patching.kinds import ForwardPatch
from ds_slide.patching.packed import prepare_packed
from ds_slide.plan.cores import Seat, Share, gpu_node, memory_nodes, share_of
from ds_slide.plan.host_room import FileMappings, groups, host_room, local_ranks, share_with
from ds_slide.plan.memory import Budgets, Plan, Taken, make_plan
from ds_slide.report.log import log
from ds_slide.runtime.build import Blueprint, build_runtime
from ds_slide.runtime.core import running
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.sharing import open_sharing
from ds_slide.runtime.core.settings import RuntimeSettings, UnitPlan
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.weights.experts import ExpertsInSlot, sources_of
from ds_slide.runtime.weights.rows import StreamedHead, check_streamed_head, chunk_rows, find_streamed_head
from ds_slide.store.host_memory import require_page_locks


def assemble(
    module: nn.Module,
    group_of: dict[nn.Parameter, int],
    settings: RuntimeSettings,
    process_group: Any,
    precisions: Precisions = MappingProxyType({}),
) -> tuple[SlideRuntime, Replaced]:
    """Build the runtime for `module`, whose parameters have ZeRO-3's attributes already, and put kernels into the
    module. The caller undoes the kernels when it closes the runtime.

    `group_of`: optimizer group of every trainable parameter. `precisions`: of parameters that have another precision
    than the declared one. Collective over the ranks.
    """
    config = settings.slide
    device = Device(torch.device(get_accelerator().current_device_name()))
    ranks = Ranks.over(process_group, device, divides_sequences=_get_sequence_parallel_world_size() > 1)
    if config.compression is not None and settings.trains:
        sharing = open_sharing(ranks, True, "ds_slide.compression is set for several ranks", REMOVE)
    else:
        sharing = open_sharing(ranks, config.share_weights)
    kernels = None
    # The plan comes before any memory is taken; kernels come before the runtime's hooks.
    try:
        # The model is divided into units, and the ranks agree on the memory that each of them has.
        unit_plans, head = divided(
            module, group_of, settings, ranks.world_size, precisions, shares_weights=sharing is not None
        )
        share_with(ranks.exchange(groups(), "counting the ranks in each memory control group"))
        carried = [each.tensor for unit_plan in unit_plans for each in unit_plan.spec.carried if not each.is_alias]
        budgets = _agreed(_budgets(module, carried, config, device), ranks)
        plan = plan_of(unit_plans, settings, budgets, shares_weights=sharing is not None)
        if device.is_cuda:
            require_page_locks(plan.host_bytes)
        kernels = apply_kernels(module, config.kernels, get_accelerator().device_name())
        kernels.patches.extend(prepare_packed(module, {id(tensor) for tensor in carried}, device.torch))
        log.debug("kernels: %s", kernels)
        clients, cores = DeepSpeedClients(ranks.rank, process_group), _cores(ranks, device)
        runtime = build_runtime(module, Blueprint(unit_plans, plan, settings, ranks, device, clients, sharing, cores))
        kernels.patches.append(DividedTensors(runtime))
        kernels.patches.extend(adapt_parametrized(module))
        kernels.patches.extend(_expert_patches(module, group_of if settings.trains else None, runtime))
        if head is not None:
            assert runtime.rows is not None
            kernels.patches.append(stream_head(head.module, runtime.rows))
    except BaseException:
        if kernels is not None:
            kernels.undo()
        if sharing is not None:
            sharing.close()
        raise
    _release_cached_host_memory()
    return runtime, kernels


def _expert_patches(
    module: nn.Module, trained: Mapping[nn.Parameter, int] | None, runtime: SlideRuntime
) -> Iterator[ForwardPatch]:
    """Make experts that are fetched when they are needed compute with what is fetched, and yield what undoes that."""
    for experts, source in sources_of(runtime, find_experts(module, trained)[0]):
        if isinstance(source, ExpertsInSlot):
            yield bring_experts(experts, source)
        else:
            yield from stream_experts(experts, source)


def accumulates(ds_config: Mapping[str, Any], accumulation_steps: int) -> bool:
    """Whether a step has more than one micro-batch. `ds_config`: raw."""
    # Without management, DeepSpeed does not say which backward is the last: the script calls step() at any time.
    return accumulation_steps > 1 or not ds_config.get("managed_gradient_accumulation", True)


def divided(
    module: nn.Module,
    group_of: Mapping[nn.Parameter, int],
    settings: RuntimeSettings,
    world_size: int,
    precisions: Precisions = MappingProxyType({}),
    *,
    shares_weights: bool,
) -> tuple[list[UnitPlan], StreamedHead | None]:
    """Return the units of `module` in the order of their use in a forward, and the head whose rows are streamed.
    `shares_weights`: whether several ranks read each other's host memory."""
    config, precisions = settings.slide, _with_rules(precisions, group_of, settings)
    head = find_streamed_head(module, world_size) if config.stream_head else None
    leaves = [child for child in module.modules() if z3_leaf_module(child)]
    apart = () if head is None else (head.path,)
    compressed = [parameter for parameter in group_of if settings.compresses(parameter)]
    # `state_dict()` is for one rank alone, so it has to find whole buffers without the other ranks.
    on_ssd = settings.ssd is not None and settings.ssd.weights
    carries_buffers = world_size == 1 or (shares_weights and not on_ssd)
    structure = find_structure(
        module, config.blocks, apart, leaves, precisions, compressed, carries_buffers=carries_buffers
    )
    if head is not None:
        check_streamed_head(head, structure, settings)
    if config.compression is not None and settings.trains:
        _check_compressed(config.compression, [part for part in structure.parts if part.compressed])
    specs = _in_forward_order(module, structure.units)
    # Experts move in parts where this rank has all of them in its host memory, or can read them in the other ranks'.
    trained = group_of if settings.trains else None
    experts = _experts(module, trained, specs, config, readable=carries_buffers and not on_ssd)
    return [_unit_plan(spec, group_of, settings, world_size, head, experts) for spec in specs], head


def _experts(
    module: nn.Module,
    trained: Mapping[nn.Parameter, int] | None,
    specs: Sequence[UnitSpec],
    config: SlideConfig,
    *,
    readable: bool,
) -> frozenset[str]:
    """Return the names of the parameters of experts that can move in parts. Raises SlideConfigError where the block
    asks for that and none can. `readable`: whether this rank can read all weights in host memory."""
    if not config.experts:
        return frozenset()
    found, reasons = find_experts(module, trained)
    # They are fetched beside the rest of their block, which has nothing packed.
    of_blocks = [
        {name for name, _ in spec.parameters}
        for spec in specs
        if spec.kind == "block" and not spec.carried and not spec.as_bytes and not spec.precision.narrowed
    ]
    in_blocks = {each.path: each for each in found if any(names > set(each.parameter_names) for names in of_blocks)}
    reasons |= {each.path: "no block has them beside other weights" for each in found if each.path not in in_blocks}
    if readable and in_blocks:
        return frozenset(name for each in in_blocks.values() for name in each.parameter_names)
    if config.experts != "auto":
        path, reason = next(iter(reasons.items()), ("", "it has no fused experts of transformers 5"))
        reason = reason if readable else "their weights may go to SSD, or each rank has a part of them"
        raise SlideConfigError(
            f"ds_slide.experts is {config.experts}, but the experts of {path or 'the model'} cannot move in parts: "
            f'{reason}; set it to "auto" or 0'
        )
    return frozenset()


def _with_rules(precisions: Precisions, group_of: Mapping[nn.Parameter, int], settings: RuntimeSettings) -> Precisions:
    """Return `precisions` with the rule of each trained parameter that another rule than the run's updates: a unit has
    one rule."""
    rule = settings.rule
    other = {} if rule is None else {p: rule.of_group(group) for p, group in group_of.items()}
    return dict(precisions) | {
        parameter: dataclasses.replace(precisions.get(parameter) or Precision.declared(parameter), rule=own.name)
        for parameter, own in other.items()
        if own is not rule
    }


def _check_compressed(compression: CompressionConfig, parts: Sequence[UnitSpec]) -> None:
    if not parts:
        raise SlideConfigError(
            "ds_slide.compression is set, but no block has a trainable matrix whose smaller side is at least "
            f"{2 * LEAST_SUBSPACE}; remove it"
        )
    others = {part.precision.weight for part in parts} - {torch.bfloat16}
    if compression.master_dtype == "bf16" and others:
        raise SlideConfigError(
            f'ds_slide.compression.master_dtype is "bf16", but there are weights in {others.pop()}, which are their '
            'own masters; set it to "fp32"'
        )


def _in_forward_order(module: nn.Module, units: Sequence[UnitSpec]) -> list[UnitSpec]:
    """Return the units by the index of their first parameter in the module: the embedding before the blocks, an untied
    head after.

    Updates have their deadlines in this order: a head that is needed last does not hold up the first block.
    """
    place = {parameter: number for number, parameter in enumerate(module.parameters())}
    return sorted(units, key=lambda unit: place[unit.parameters[0][1]])


def _unit_plan(
    spec: UnitSpec,
    group_of: Mapping[nn.Parameter, int],
    settings: RuntimeSettings,
    world_size: int,
    head: StreamedHead | None,
    experts: Collection[str],
) -> UnitPlan:
    by_name = dict(spec.parameters)
    infos = [
        ParameterInfo(
            name,
            parameter_shape(parameter),
            parameter_numel(parameter),
            group_of.get(parameter),
            parameter.dtype if name in spec.as_bytes else None,
            of_experts=name in experts,
        )
        for name, parameter in spec.parameters
    ]
    carried = [
        ParameterInfo(each.name, each.shape, each.numel, None, each.tensor.dtype)
        for each in spec.carried
        if not each.is_alias
    ]
    layout = build_layout(infos, world_size, spec.precision.weight.itemsize, carried)
    passes = head is not None and any(parameter is head.module.weight for parameter in by_name.values())
    rows = chunk_rows(*layout.entries[0].shape) if passes else 0
    codec_of = settings.compressing_codec_of if spec.compressed else settings.codec_of
    codec = codec_of(spec.precision, layout)
    return UnitPlan(spec, layout, [by_name[entry.name] for entry in layout.entries], codec, rows)


def plan_of(
    unit_plans: Sequence[UnitPlan], settings: RuntimeSettings, budgets: Budgets, *, shares_weights: bool
) -> Plan:
    """Return the plan of all memory. Raises SlideError where it does not fit."""
    needs = settings.needs(
        world_size=unit_plans[0].layout.world_size, shares_weights=shares_weights, gpu_is_own=budgets.gpu_is_own
    )
    return make_plan([unit_plan.size(settings) for unit_plan in unit_plans], needs, budgets)


def _budgets(module: nn.Module, carried: Sequence[torch.Tensor], config: SlideConfig, device: Device) -> Budgets:
    """Return the free memory as it will be once the present copies of the parameters and of `carried` tensors, which
    DS-Slide takes over, are gone."""
    on_gpu = on_host = 0
    files = FileMappings.now()
    of_parameters = (each for p in module.parameters() for each in (p.data, getattr(p, "ds_tensor", None)))
    for tensor in (*of_parameters, *carried):
        if tensor is None:
            continue
        size = tensor.numel() * tensor.element_size()
        if tensor.device == device.torch and device.is_cuda:
            on_gpu += size
        elif tensor.device.type == "cpu" and not files.holds(tensor.data_ptr()):
            on_host += size
    # Every rank has the same engines, so each subtracts its own.
    room = host_room(local_ranks(), running.untouched_host_bytes())
    available = room.nbytes
    if device.is_cuda:
        free, total = device.memory()
        free += on_gpu
    else:
        free = total = available
    return Budgets(
        total,
        free,
        available + on_host,
        gpu_states_of(config, gpu_is_own=device.is_cuda),
        config.gpu_memory,
        config.host_memory,
        gpu_is_own=device.is_cuda,
        taken=running.taken(),
        host_source=room.source,
    )


def gpu_states_of(config: SlideConfig, *, gpu_is_own: bool) -> int | None:
    """Return the bytes of the GPU that the block asks for, for optimizer states. None: the plan chooses the number."""
    if config.state_dtype != "fp32":
        return 0  # the short formats are updated on the CPU; the contract has refused other values
    if not gpu_is_own and config.gpu_states == "auto":
        return 0  # the accelerator's part comes out of the same memory, so nothing is placed there unasked
    return None if config.gpu_states == "auto" else config.gpu_states


def _cores(ranks: Ranks, device: Device) -> Share:
    """Return the cores of this rank. Collective."""
    seat = Seat.of_this_process(gpu_node(device.torch.index if device.is_cuda else None))
    seats = ranks.exchange(seat, "telling which cores each rank may use")
    return share_of(ranks.rank, seats, memory_nodes())


def _agreed(budgets: Budgets, ranks: Ranks) -> Budgets:
    """Return the budgets with the memory that every rank has: the plan decides when weights are gathered, and must be
    the same on all ranks."""
    # Memory of earlier engines, too: an engine dropped without destroy() goes when Python collects it.
    negative = [-taken for taken in dataclasses.astuple(budgets.taken)]
    least = ranks.least([budgets.gpu_total, budgets.gpu_free, budgets.host_free, *negative])
    taken = Taken(*(-value for value in least[3:]))
    source = budgets.host_source if least[2] == budgets.host_free else "on another rank"
    return dataclasses.replace(
        budgets, gpu_total=least[0], gpu_free=least[1], host_free=least[2], taken=taken, host_source=source
    )


def _release_cached_host_memory() -> None:
    """Give back the page-locked memory that the weights were in under zero.Init, which torch keeps for reuse."""
    if torch.cuda.is_available():
        if (release := getattr(torch._C, "_host_emptyCache", None)) is not None:
            release()
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------------------
# DeepSpeed's `torch_autocast`: a model in fp32 whose matrix products run in bf16.
#
# Stock ZeRO-3 gathers the weights of modules that are safe in lower precision (linear and convolutional ones, or
# the modules that the JSON names) in bf16, widens them again, and autocast narrows them at each use. Here the weights
# themselves are kept in bf16, beside the low halves of their exact masters: they cross to the GPU in the type that
# autocast computes with, so that it has nothing to cast. A weight that another module has as well (a tied embedding,
# which computes in fp32) stays as it is, and so do frozen weights, which have no master for their low halves.
#
# Gradients leave as in stock: in bf16 where stock gathers the weights in bf16, otherwise in the parameters' type.


def autocast_is_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether `torch_autocast` is on. `ds_config`: raw."""
    return bool((ds_config.get("torch_autocast") or {}).get("enabled", False))


def precisions_under_autocast(
    module: nn.Module, ds_config: Mapping[str, Any], trainable: Collection[nn.Parameter]
) -> Precisions:
    """Return the precision of each parameter of `module`, where DeepSpeed has marked some with the data type of their
    collectives; nothing without autocast. `trainable`: the parameters that an optimizer updates."""
    if not autocast_is_enabled(ds_config):
        return {}
    names = ds_config["torch_autocast"].get("lower_precision_safe_modules")
    # DeepSpeed has found these classes before, and compares exact types.
    safe = {resolve_name(name) for name in names or get_default_autocast_lower_precision_modules()}
    owners: dict[nn.Parameter, set[type[nn.Module]]] = defaultdict(set)
    for child in module.modules():
        # `values` gathers nothing; ZeRO-3's dictionary gathers a parameter that is looked up in it.
        for name, parameter in child._parameters.items():
            if parameter is not None:
                # `spectral_norm` makes `weight` of `weight_orig`, with fp32 vectors and outside of autocast.
                is_made_into_weight = name.rpartition("_")[0] in vars(child)
                owners[parameter].add(nn.Module if is_made_into_weight else type(child))
    found = {}
    for parameter in module.parameters():
        dtype = parameter.dtype
        marked = parameter in trainable and has_comm_dtype(parameter)
        reduced = get_comm_dtype(parameter) if marked else dtype
        narrows = dtype == torch.float32 and reduced == torch.bfloat16 and owners[parameter] <= safe
        found[parameter] = Precision(dtype, reduced if narrows else dtype, reduced)
    return found
