"""The codec of LSP-Offload by launches over groups of matrices, against one matrix at a time in plain torch: the same
bits, in few launches, within the workspaces that a plan counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from ds_slide.compression.codec import CHANGE_DTYPE, Masters, SegmentStep
from ds_slide.compression.lsp.codec import Lsp, Pair
from ds_slide.compression.lsp.projector import random_projector
from ds_slide.config import CompressionConfig
from ds_slide.kernels.launch import Compiled, aligned, launch
from ds_slide.kernels.lsp import grouped_apply
from ds_slide.model.layout import ParameterInfo, Segment, build_layout, pieces
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.reference import encode_split
from ds_slide.optim.rounding import step_key

pytestmark = pytest.mark.usefixtures("nearest_bfloat16", "poisoned_memory", "quick_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPRESSING = ["_squares_kernel", "_left_kernel", "_right_kernel", "_total_kernel"]
APPLYING = ["_transpose_kernel", "_expand_kernel", "_apply_kernel"]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Shapes = Sequence[tuple[int, int]]
# q, k, v, o, gate, up and down of a block, in small; sides that no vector divides, with d of 19, 16, 25 and 17; and
# more than one launch takes.
BLOCK: Shapes = [(48, 48), (32, 48), (32, 48), (48, 48), (64, 48), (64, 48), (48, 64)]
ODD: Shapes = [(39, 75), (300, 33), (64, 64), (35, 34)]
MANY: Shapes = [(32, 32 + 16 * (number % 2)) for number in range(18)]


def codec(
    shapes: Shapes,
    dtype: torch.dtype = torch.bfloat16,
    d: int = 32,
    r: int = 4,
    groups: int = 1,
    ranks: int = 1,
    first: int = 0,
) -> Lsp:
    """Its matrices have the names `first`, `first` + 1 and so on."""
    infos = [ParameterInfo(str(first + i), shape, shape[0] * shape[1], i % groups) for i, shape in enumerate(shapes)]
    made = Lsp(build_layout(infos, ranks), dtype, CompressionConfig(type="lsp", d=d, r=r))
    encoding = torch.full((made.encode_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    applying = torch.full((made.apply_bytes // 4,), torch.nan, dtype=CHANGE_DTYPE, device=DEVICE)
    made.begin(torch.device(DEVICE), encoding, applying)
    return made


def block() -> Lsp:
    return codec(BLOCK)


def odd(ranks: int = 1) -> Lsp:
    """Of two parameter groups."""
    return codec(ODD, d=25, r=3, groups=2, ranks=ranks)


def many() -> Lsp:
    return codec(MANY, d=16, r=1)


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Over many orders of magnitude, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(*shape, generator=generator) * 10.0 ** torch.randint(-6, 3, shape, generator=generator)
    spread[torch.rand(*shape, generator=generator) < 0.1] = -0.0
    return spread.to(dtype).to(DEVICE)


def gradients(of: Lsp, dtype: torch.dtype, seed: int, missing: Sequence[int] = ()) -> list[Tensor | None]:
    return [
        None if number in missing else values(*matrix.entry.shape, seed=seed + number, dtype=dtype)
        for number, matrix in enumerate(of.matrices)
    ]


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    kind = BITS[expected.element_size()]
    assert torch.equal(found.view(kind), expected.view(kind))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("of", "given", "dtype", "held", "missing"),
    [
        (block, torch.bfloat16, torch.bfloat16, torch.float32, (0, 4)),
        (odd, torch.bfloat16, torch.bfloat16, torch.bfloat16, (1,)),
        (odd, torch.float16, torch.float16, torch.float16, ()),
        (odd, torch.float32, torch.float32, torch.float32, (3,)),
        (odd, torch.bfloat16, torch.bfloat16, torch.float16, (0, 1, 2, 3)),
        (many, torch.bfloat16, torch.float32, torch.float32, (0, 17)),
    ],
)
def test_encode(
    of: Callable[[], Lsp], given: torch.dtype, dtype: torch.dtype, held: torch.dtype, missing: Sequence[int]
) -> None:
    made = of()
    made.dtype = dtype
    found = torch.full((made.numel,), torch.nan, dtype=held, device=DEVICE)
    expected = found.clone()
    for accumulate, seed in ((False, 1), (True, 100), (True, 200)):
        sources = gradients(made, given, seed, missing if seed != 100 else (2,))
        summed = made.encode_in_groups(sources, found, accumulate=accumulate)
        wanted = made.encode_one_by_one(sources, expected, accumulate=accumulate)
        assert_same_bits(found, expected)
        torch.testing.assert_close(summed, wanted, rtol=1e-13, atol=0.0)


def test_gradients_of_two_data_types() -> None:
    made = odd()
    found, expected = torch.empty(2, made.numel, dtype=torch.bfloat16, device=DEVICE)
    sources = [*gradients(made, torch.float32, 1)[:2], *gradients(made, torch.bfloat16, 1)[2:]]
    assert sources[0] is not None
    sources[0] = sources[0].T.contiguous().T
    summed = made.encode_in_groups(sources, found, accumulate=False)
    wanted = made.encode_one_by_one(sources, expected, accumulate=False)
    assert_same_bits(found, expected)
    torch.testing.assert_close(summed, wanted, rtol=1e-13, atol=0.0)


def steps_of(made: Lsp, hypers: Sequence[AdamWHyper]) -> list[SegmentStep]:
    """An update of all matrices."""
    return [SegmentStep(segment, hypers[segment.group]) for segment in made.segments]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("of", [block, odd, many])
@pytest.mark.parametrize("kind", ["split", "bf16", "fp32"])
def test_apply(of: Callable[[], Lsp], kind: str) -> None:
    made = of()
    weight, remainder = values(made.layout.slot_numel, seed=1), None
    if kind == "split":
        high, remainder = encode_split(weight)
        weight = high.view(torch.bfloat16)
    elif kind == "bf16":
        weight = weight.bfloat16()
    key = step_key(1 << 40, 7) if kind == "bf16" else None
    masters = Masters(weight, remainder)
    found = Masters(weight.clone(), None if remainder is None else remainder.clone())
    written = values(made.numel, seed=2)
    decays = [0.9 + 0.1 * (matrix.entry.group or 0) for matrix in made.matrices]
    made.apply_one_by_one(written, masters, decays, key)
    made.apply_in_groups(written, found, decays, key)
    assert_same_bits(found.weight, masters.weight)
    if found.remainder is not None and masters.remainder is not None:
        assert_same_bits(found.remainder, masters.remainder)


def test_rounding_knows_names_and_steps_but_no_units() -> None:
    """A matrix is rounded as alone in a unit of its own, by other bits in the next step."""
    whole, number = codec([(64, 64), (32, 96)]), 1
    alone = codec([(32, 96)], first=number)
    alone.replace(0, whole.pairs[number])
    results = []
    for made, step in ((whole, 1), (whole, 1), (whole, 2), (alone, 1)):
        weight = torch.ones(made.layout.slot_numel, dtype=torch.bfloat16, device=DEVICE)
        change = torch.zeros(made.numel, device=DEVICE)
        matrix = made.matrices[-1]
        matrix.within(change).copy_(values(matrix.d, matrix.d, seed=1).clamp(-1, 1))
        made.apply([change], slice(0, made.numel), Masters(weight), steps_of(made, [AdamWHyper(lr=1e-3, step=step)]))
        results.append(matrix.of_weights(weight))
    first, again, later, by_itself = results
    assert_same_bits(again, first)
    assert_same_bits(by_itself, first)
    assert not torch.equal(later, first)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_several_ranks_are_those_of_the_whole(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, alone = odd(ranks), odd()
    monkeypatch.setattr(Lsp, "encode", Lsp.encode_in_groups)
    monkeypatch.setattr(Lsp, "apply_one_by_one", Lsp.apply_in_groups)
    sources = gradients(made, torch.bfloat16, 1, missing=(1,))
    out = torch.full((ranks * made.numel,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    summed = made.encode_for_ranks(sources, out)
    expected = torch.empty(alone.numel, dtype=torch.bfloat16, device=DEVICE)
    assert_same_bits(summed, alone.encode_in_groups(sources, expected, accumulate=False))
    assert out.isfinite().all()
    parts, joined = list(out.float().split(made.numel)), torch.zeros_like(expected)
    for rank, part, place in pieces(made.encoded):
        joined[place] = parts[rank][part].to(joined.dtype)
    assert_same_bits(joined, expected)
    assert out.count_nonzero() == expected.count_nonzero()
    weight, hypers = values(alone.layout.slot_numel, seed=1), [AdamWHyper(lr=1e-3)] * 2
    found, whole = weight.clone(), weight.clone()
    made.apply(parts, slice(0, made.numel), Masters(found), steps_of(made, hypers))
    alone.apply([expected.float()], slice(0, alone.numel), Masters(whole), steps_of(alone, hypers))
    assert_same_bits(found, whole)


def test_a_matrix_without_a_step_keeps_its_bits() -> None:
    """What the change has of it is that of an earlier update."""
    made, hyper = codec([(64, 64), (32, 96)]), AdamWHyper(lr=1e-3, weight_decay=0.1)
    weight = torch.full((made.layout.slot_numel,), -0.0, device=DEVICE)
    change = values(made.numel, seed=1)
    first, second = made.matrices
    stop = second.encoded.offset
    made.apply([change], slice(0, made.numel), Masters(weight), [SegmentStep(Segment(0, 0, stop), hyper)])
    assert first.of_weights(weight).any()
    assert_same_bits(second.of_weights(weight), torch.full_like(second.of_weights(weight), -0.0))


def test_each_group_has_the_decay_of_its_hypers() -> None:
    made, hypers = odd(), [AdamWHyper(lr=1e-3, weight_decay=decay) for decay in (0.0, 100.0)]
    weight = torch.ones(made.layout.slot_numel, device=DEVICE)
    change = torch.zeros(made.numel, device=DEVICE)
    assert made.apply([change], slice(0, made.numel), Masters(weight), steps_of(made, hypers)) == 4 * made.numel
    for matrix in made.matrices:
        assert (matrix.of_weights(weight) == hypers[matrix.entry.group or 0].constants().decay).all()


def test_projectors_are_replaced_where_they_lie() -> None:
    made, generator = odd(), torch.Generator().manual_seed(0)
    number, before = 2, [pair.left.dense() for pair in made.pairs]
    old = made.pairs[number]
    new = Pair(*(random_projector(side.rows, side.d, side.r, generator, DEVICE) for side in (old.left, old.right)))
    made.replace(number, new)
    assert torch.equal(old.left.dense(), new.left.dense()) and torch.equal(old.right.dense(), new.right.dense())
    unchanged = [torch.equal(pair.left.dense(), dense) for pair, dense in zip(made.pairs, before, strict=True)]
    assert unchanged == [True, True, False, True]
    found, expected = torch.empty(2, made.numel, dtype=torch.bfloat16, device=DEVICE)
    sources = gradients(made, torch.bfloat16, 1)
    made.encode_in_groups(sources, found, accumulate=False)
    made.encode_one_by_one(sources, expected, accumulate=False)
    assert_same_bits(found, expected)


class Operations(TorchDispatchMode):
    """Names of torch's operations but views, and of launches of kernels, which are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))

    def launched(self, kernel: Any, *_: Any, **__: Any) -> None:
        self.names.append(kernel.__name__)


@pytest.mark.parametrize(("of", "groups"), [(block, 1), (many, 2)])
def test_launches(of: Callable[[], Lsp], groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four to compress the gradients of a block, three to apply its change, however many matrices it has, and no memory
    is allocated but for the square sum."""
    made, seen = of(), Operations()
    sources = gradients(made, torch.bfloat16, 1)
    out, weight = torch.empty(made.numel, device=DEVICE), torch.empty(made.layout.slot_numel, device=DEVICE)
    monkeypatch.setattr(type(grouped_apply._apply_kernel), "run", lambda *given, **how: seen.launched(*given, **how))
    with seen:
        made.encode_in_groups(sources, out, accumulate=True)
        encoded, seen.names = seen.names, []
        made.apply_in_groups(made.applying[: made.numel], Masters(weight), [1.0] * len(made.matrices))
    poisoned = ["aten::empty.memory_format", "aten::fill_.Scalar"]
    assert encoded == [*poisoned, *COMPRESSING * groups]
    assert seen.names == APPLYING * groups


def test_launches_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more: for what pads the parts, and to lay them out."""
    made, seen = odd(2), Operations()
    monkeypatch.setattr(Lsp, "encode", Lsp.encode_in_groups)
    monkeypatch.setattr(type(grouped_apply._apply_kernel), "run", lambda *given, **how: seen.launched(*given, **how))
    out, sources = torch.empty(2 * made.numel, dtype=made.dtype, device=DEVICE), gradients(made, torch.bfloat16, 1)
    with seen:
        made.encode_for_ranks(sources, out)
    assert seen.names[-6:] == [*COMPRESSING, "aten::zero_", "aten::_foreach_copy_"]


class Kernel:
    """Stands for one of Triton, with what that compiles where there is a GPU."""

    arg_names = ("pointer", "number", "WIDTH")

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.launches.append((grid, arguments, constants))
            return {(9, 1, 1): lambda *arguments: self.launches.append(("compiled", *arguments))}

        return launch


def test_what_has_been_compiled_is_launched_by_kind() -> None:
    """Triton looks at every argument again, which takes the host longer than the launch."""
    kernel, memory = Kernel(), torch.zeros(64, device=DEVICE)
    known: Compiled = {}
    kinds: list[Any] = [(torch.float32,), (torch.float32,), (torch.bfloat16,), None, None, (torch.bfloat16,)]
    for number, kind in enumerate(kinds):
        launch(known, kernel, kind, 9, (memory, number), WIDTH=2)
    by_triton = [((9,), (memory, number), {"WIDTH": 2}) for number in range(6)]
    directly = [("compiled", memory, number, None) for number in range(6)]
    assert kernel.launches == [by_triton[0], directly[1], *by_triton[2:5], directly[5]]
    launch({}, kernel, kinds[0], 9, (memory, 0), WIDTH=2)
    assert kernel.launches[-1] == by_triton[0]
    assert aligned([memory, memory[4:]])
    assert not aligned([memory, memory[2:]])
