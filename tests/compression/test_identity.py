"""The ways in which the codec that changes nothing encodes a unit's gradients: the same bits, and their square sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.compression.codec import Identity, ParameterGradients, square_sum
from ds_slide.model.layout import ParameterInfo, build_layout, piece

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(3, 17), (64,), (5,), (2, 3, 11), (128,)]
TRAINED = SHAPES[:-1]


def codec(world_size: int = 1) -> Identity:
    """Of a layout with gaps; the last parameter is frozen."""
    infos = [
        ParameterInfo(str(index), shape, torch.Size(shape).numel(), 0 if shape in TRAINED else None)
        for index, shape in enumerate(SHAPES)
    ]
    return Identity(build_layout(infos, world_size), torch.bfloat16)


def gradients(unused: set[int], seed: int) -> list[torch.Tensor | None]:
    """Whole numbers, whose sums bf16 holds: Triton's interpreter does not round to bf16 as GPUs do. Not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return [
        None
        if index in unused
        else torch.randint(-9, 9, shape[::-1], generator=generator)
        .to(DEVICE, torch.bfloat16)
        .permute(*reversed(range(len(shape))))
        for index, shape in enumerate(TRAINED)
    ]


def filled(value: float, numel: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((numel,), value, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("unused", [set(), {1}, {0, 3}, {0, 1, 2, 3}])
def test_bits_and_square_sum(unused: set[int]) -> None:
    out = filled(torch.nan, codec().numel)
    expected = out.clone()
    for accumulate, seed in ((False, 1), (True, 2), (True, 3)):
        # Another parameter goes without in the second micro-batch.
        of_micro_batch = gradients(unused if seed != 2 else {2}, seed)
        summed = codec().encode_in_one_pass(of_micro_batch, out, accumulate=accumulate)
        codec().encode_by_torch(of_micro_batch, expected, accumulate=accumulate)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
        torch.testing.assert_close(summed, square_sum(expected), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("encode", [codec().encode_in_one_pass, codec().encode_by_torch])
def test_gradients_in_fp32_are_rounded_before_they_are_added(encode: Callable[..., object]) -> None:
    """2^-8 beside 1 is half a bf16 ulp, a tie that goes to the even 1: added in fp32, two of them would be seen."""
    out = filled(0.0, codec().numel, torch.float32)
    given: ParameterGradients = [torch.full(shape, 1.0 + 2**-8, device=DEVICE) for shape in TRAINED]
    for accumulate in (False, True):
        encode(given, out, accumulate=accumulate)
    for entry in codec().layout.entries[: len(TRAINED)]:
        assert (out[entry.offset : entry.offset + entry.numel] == 2.0).all()


def test_the_rest_of_a_staging_buffer_is_left_alone() -> None:
    numel = codec().numel
    out = filled(7.0, numel + 128)
    summed = codec().encode(gradients({1}, 4), out, accumulate=False)
    assert (out[numel:] == 7).all()
    assert (summed is None) == (DEVICE == "cpu")


def test_what_lies_in_place_is_what_a_buffer_would_hold() -> None:
    given = gradients({1}, 5)
    expected = filled(torch.nan, codec().numel)
    codec().encode(given, expected, accumulate=False)
    places = codec().encode_in_place(given)
    parts = [filled(0.0, place.numel) if place.flat is None else place.flat for place in places]
    assert torch.equal(torch.cat(parts), expected)
    assert [place.start for place in places] == [0, *itertools.accumulate(place.numel for place in places[:-1])]


@pytest.mark.parametrize("way", ["encode_for_ranks", "encode_for_ranks_in_one_pass", "encode_for_ranks_by_torch"])
def test_every_rank_gets_its_pieces(way: str) -> None:
    """Also where the pieces of a rank begin at no multiple of 16 bytes, and where a small parameter has none for it."""
    given, whole = gradients({1}, 6), codec(3)
    out = filled(torch.nan, 3 * whole.numel)
    getattr(whole, way)(given, out)
    expected = torch.zeros_like(out).view(3, -1)
    for entry, gradient in zip(whole.layout.entries, given, strict=False):
        for rank in range(3):
            start, stop = piece(entry, rank)
            if gradient is not None:
                expected[rank, entry.offset : entry.offset + stop - start] = gradient.reshape(-1)[start:stop]
    assert torch.equal(out, expected.view(-1))
