"""The packed buffer bit by bit and its square sum in fp64, against plain torch, over layouts with every kind of gap."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from references.gradient_pack import pack_gradients_reference

from ds_slide.compression.codec import Identity
from ds_slide.errors import SlideError
from ds_slide.kernels.offload import square_sum
from ds_slide.kernels.offload.gradient_pack import BLOCK, CHUNK, WIDTH, pack_gradients
from ds_slide.model.layout import ParameterInfo, align_up, build_layout

pytestmark = pytest.mark.usefixtures("nearest_bfloat16", "poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}

LAYOUTS = {
    "one element": [1],
    "a program to the element": [BLOCK],
    "a program and one element": [BLOCK + 1, 3],
    "a block's parameters": [64, 3 * CHUNK, 17 * 64, 2 * BLOCK, 5, BLOCK - 1, 128, 3 * BLOCK + 77, 64],
    "more than one launch": [3 * (index + 1) for index in range(2 * WIDTH + 3)],
    "empty parameters": [0, 100, 0, 0, 65, 0],
}


def values(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Over many orders of magnitude, with zeros of both signs."""
    spread = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 4, (numel,), generator=generator)
    spread[torch.randint(0, 7, (numel,), generator=generator) == 0] = -0.0
    return spread.to(dtype).to(DEVICE)


def places(numels: list[int], aligned: bool = True) -> tuple[list[int], int]:
    """Offsets of a layout and the length of its buffer."""
    sums = list(itertools.accumulate((align_up(n) if aligned else n + 3 for n in numels), initial=0))
    return sums[:-1], sums[-1]


def pack(
    sources: list[torch.Tensor | None], buffer: torch.Tensor, offsets: list[int], *, accumulate: bool
) -> torch.Tensor:
    square_sum = torch.full((), torch.nan, dtype=torch.float64, device=DEVICE)
    pack_gradients(sources, buffer, offsets, square_sum, accumulate=accumulate)
    return square_sum


def check(sources: list[torch.Tensor | None], buffer: torch.Tensor, offsets: list[int], accumulate: bool) -> None:
    expected, expected_sum = pack_gradients_reference(sources, buffer, offsets, accumulate=accumulate)
    square_sum = pack(sources, buffer, offsets, accumulate=accumulate)
    assert torch.equal(buffer.view(BITS[buffer.dtype]), expected.view(BITS[buffer.dtype]))
    # Two fp64 sums of the same non-negative terms differ by at most numel * 2^-53, here 1e-11 at worst, far less seen.
    torch.testing.assert_close(square_sum, expected_sum, rtol=1e-13, atol=0.0)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, accumulate: bool) -> None:
    generator = torch.Generator().manual_seed(len(name))
    offsets, total = places(LAYOUTS[name])
    sources = [values(numel, torch.bfloat16, generator) for numel in LAYOUTS[name]]
    # Without accumulation nothing of the old buffer may be left: it is nan.
    buffer = values(total, torch.bfloat16, generator) if accumulate else torch.full((total,), torch.nan)
    check(sources, buffer.to(DEVICE, torch.bfloat16), offsets, accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("buffer_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, buffer_dtype: torch.dtype, accumulate: bool) -> None:
    generator = torch.Generator().manual_seed(7 + accumulate)
    numels = [BLOCK + 65, 70]
    offsets, total = places(numels)
    sources = [values(numel, dtype, generator) for numel in numels]
    check(sources, values(total, buffer_dtype, generator), offsets, accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
def test_missing_gradients_and_mixed_dtypes(accumulate: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    numels = [70, BLOCK + 9, 40, 200, 100]
    offsets, total = places(numels)
    sources: list[torch.Tensor | None] = [values(numel, torch.bfloat16, generator) for numel in numels]
    sources[0] = sources[3] = None
    sources[2] = values(40, torch.float32, generator)
    check(sources, values(total, torch.bfloat16, generator), offsets, accumulate)
    check([None] * 5, values(total, torch.bfloat16, generator), offsets, accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
def test_unaligned_places_and_strided_sources(accumulate: bool) -> None:
    generator = torch.Generator().manual_seed(13)
    numels = [33, 17 * 31, BLOCK + 1]
    offsets, total = places(numels, aligned=False)
    sources = [
        values(66, torch.bfloat16, generator)[::2],
        values(17 * 31, torch.bfloat16, generator).view(31, 17).t(),
        values(BLOCK + 2, torch.bfloat16, generator)[1:],
    ]
    check(sources, values(total, torch.bfloat16, generator), offsets, accumulate)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [3, BLOCK + 70])
def test_what_is_not_finite_shows(bad: float, place: int) -> None:
    source = torch.ones(BLOCK + 71, dtype=torch.bfloat16, device=DEVICE)
    source[place] = bad
    buffer = torch.zeros(align_up(source.numel()), dtype=torch.bfloat16, device=DEVICE)
    square_sum = pack([source], buffer, [0], accumulate=False)
    assert not torch.isfinite(square_sum)
    assert torch.equal(buffer[: source.numel()].view(torch.int16), source.view(torch.int16))


def test_large_finite_gradients_stay_finite() -> None:
    source = torch.full((BLOCK,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16, device=DEVICE)
    square_sum = pack([source], torch.empty_like(source), [0], accumulate=False)
    torch.testing.assert_close(square_sum, source.double().square().sum(), rtol=1e-13, atol=0.0)


def test_a_cast_that_overflows_shows() -> None:
    source = torch.full((8,), 7e4, device=DEVICE)
    buffer = torch.empty(8, dtype=torch.float16, device=DEVICE)
    assert pack([source], buffer, [0], accumulate=False).isinf() and buffer.isinf().all()


def test_a_gradient_without_a_number() -> None:
    """nan with a payload, as fp16 overflow leaves it, is moved and not rewritten."""
    source = torch.tensor([0x7FC1, -0x3F, 0x7F81, 0x0001], dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    buffer = torch.empty(4, dtype=torch.bfloat16, device=DEVICE)
    pack([source], buffer, [0], accumulate=False)
    assert torch.equal(buffer.view(torch.int16), source.view(torch.int16))


def test_the_sum_has_one_order() -> None:
    generator = torch.Generator().manual_seed(17)
    numels = [3 * BLOCK + 5, 129]
    offsets, total = places(numels)
    sources = [values(numel, torch.bfloat16, generator) for numel in numels]
    sums = [pack(sources, torch.empty(total, dtype=torch.bfloat16, device=DEVICE), offsets, accumulate=False)]
    # The same buffer from other pieces of memory, and by adding to nothing.
    copies = [source.clone() for source in sources]
    sums.append(pack(copies, torch.zeros(total, dtype=torch.bfloat16, device=DEVICE), offsets, accumulate=True))
    assert torch.equal(sums[0].view(torch.int64), sums[1].view(torch.int64))


def test_more_partial_sums_than_are_combined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(square_sum, "COMBINE_BLOCK", 4)
    generator = torch.Generator().manual_seed(21)
    numels = [64] * 9
    offsets, total = places(numels)
    sources = [values(numel, torch.float32, generator) for numel in numels]
    check(sources, torch.empty(total, device=DEVICE), offsets, False)


def test_an_empty_buffer() -> None:
    buffer = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)
    assert pack([None, buffer], buffer, [0, 0], accumulate=False) == 0.0


def test_refusals() -> None:
    buffer = torch.zeros(128, dtype=torch.bfloat16, device=DEVICE)
    source = torch.ones(65, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(SlideError, match="source 0 has 65 elements, but its part of the buffer has 64"):
        pack([source, source[:3]], buffer, [0, 64], accumulate=False)
    with pytest.raises(SlideError, match="must ascend from 0"):
        pack([source[:3], source[:3]], buffer, [64, 0], accumulate=False)
    with pytest.raises(SlideError, match="must ascend from 0"):
        pack([source[:3]], buffer, [64], accumulate=False)
    with pytest.raises(SlideError, match="2 sources but 1 offsets"):
        pack([source, source], buffer, [0], accumulate=False)
    with pytest.raises(SlideError, match=r"source 0 is torch\.float64"):
        pack([source.double()], buffer, [0], accumulate=False)
    with pytest.raises(SlideError, match="the buffer must be flat, contiguous"):
        pack([source], torch.zeros(256, dtype=torch.bfloat16, device=DEVICE)[::2], [0], accumulate=False)
    with pytest.raises(SlideError, match="square_sum must be a float64 scalar"):
        pack_gradients([source], buffer, [0], buffer[0], accumulate=False)
    assert not buffer.any()


def test_no_graph_goes_through() -> None:
    source = torch.ones(64, device=DEVICE, requires_grad=True)
    buffer = torch.zeros(64, device=DEVICE)
    pack([source * 2], buffer, [0], accumulate=False)
    assert buffer.grad_fn is None and (buffer == 2).all()
    with pytest.raises(SlideError, match="the buffer requires grad"):
        pack([source], buffer.requires_grad_(), [0], accumulate=False)


def test_the_operator_is_registered_well() -> None:
    generator = torch.Generator().manual_seed(19)
    sources = [values(65, torch.bfloat16, generator), None, values(30, torch.bfloat16, generator)]
    buffer, square_sum = values(256, torch.bfloat16, generator), torch.zeros((), dtype=torch.float64, device=DEVICE)
    torch.library.opcheck(torch.ops.ds_slide.pack_gradients, (sources, buffer, [0, 128, 192], square_sum, True))


def test_torch_compile_goes_through() -> None:
    def normalised(
        first: torch.Tensor, second: torch.Tensor, buffer: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        pack_gradients([first, second], buffer, [0, 128], total, accumulate=False)
        return buffer / total.sqrt()

    generator = torch.Generator().manual_seed(23)
    first, second = values(65, torch.float32, generator), values(64, torch.float32, generator)
    found, expected = (
        function(first, second, torch.empty(192, device=DEVICE), torch.empty((), dtype=torch.float64, device=DEVICE))
        for function in (torch.compile(normalised, fullgraph=True, backend="aot_eager"), normalised)
    )
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "numels",
    [
        [2 * BLOCK, 128, BLOCK],
        [3 * CHUNK, 24 * 16, 48],
        [64, 3 * CHUNK, 17 * 64, 5, BLOCK - 1, 128, 2 * BLOCK + 77, 1],
        [64 * (index + 1) for index in range(WIDTH + 2)],
    ],
    ids=["parts of 64", "parts of 8", "parts of any size", "more than one launch"],
)
def test_parts_of_all_ranks(ranks: int, numels: list[int]) -> None:
    """One launch takes the gradients apart: the bits of copies, zeros in gaps and in the padding of the last ranks."""
    layout = build_layout([ParameterInfo(f"p{index}", (numel,), numel, 0) for index, numel in enumerate(numels)], ranks)
    codec, generator = Identity(layout, torch.bfloat16), torch.Generator().manual_seed(ranks)
    gradients: list[torch.Tensor | None] = [
        None if index == 1 else values(entry.numel, torch.float32 if index == 2 else torch.bfloat16, generator)
        for index, entry in enumerate(codec.entries)
    ]
    found, expected = (torch.full((ranks * codec.numel,), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in "ab")
    codec.encode_for_ranks_in_one_pass(gradients, found)
    codec.encode_for_ranks_by_torch(gradients, expected)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert not expected.isnan().any()
