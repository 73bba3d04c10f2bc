"""The update of split states against its reference, bit by bit, and against torch's AdamW in fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.errors import SlideError
from ds_slide.kernels.offload.adamw_split import BLOCK, adamw_split_
from ds_slide.optim.adamw import AdamWConstants, AdamWHyper
from ds_slide.optim.reference import decode_split, encode_split, reference_update_
from ds_slide.optim.rule import Elements

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMES = ("weight", "remainder", "exp_avg", "exp_avg_sq", "gradient")


def split_states(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """bf16 weight, remainder, moments and gradient over many orders of magnitude, subnormals among them."""
    generator = torch.Generator().manual_seed(numel)

    def spread(low: int, high: int) -> torch.Tensor:
        return torch.randn(numel, generator=generator) * torch.logspace(low, high, numel)

    high, low = encode_split(spread(-40, 3))
    states = [high.view(torch.bfloat16), low, spread(-44, 0), spread(-22, 0).square(), spread(-40, 1).to(dtype)]
    return [state.to(DEVICE) for state in states]


def step_of(hyper: AdamWHyper, grad_scale: float = 1.0) -> tuple[AdamWConstants, bool]:
    """The arguments behind the buffers."""
    return hyper.constants(grad_scale), hyper.adam_w_mode


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor], where: object = "") -> None:
    for name, got, want in zip(NAMES, found, expected, strict=False):
        assert torch.equal(bits(got), bits(want)), (name, where)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, 4 * BLOCK + 3])
def test_has_the_bits_of_the_reference(numel: int, dtype: torch.dtype, adam_w_mode: bool) -> None:
    *expected, gradient = split_states(numel, dtype)
    found, unread = [state.clone() for state in expected], gradient.clone()
    for step in (1, 2, 7):
        hyper = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, step=step, adam_w_mode=adam_w_mode)
        weight, remainder, *moments = expected
        reference_update_(Elements(weight, remainder, moments, gradient), hyper, 0.37)
        adamw_split_(*found, gradient, *step_of(hyper, 0.37))
        assert_same_bits(found, expected, step)
    assert torch.equal(bits(gradient), bits(unread))


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_follows_torch_in_fp64(adam_w_mode: bool) -> None:
    generator = torch.Generator().manual_seed(29 + adam_w_mode)
    numel, scale = 1031, 0.37
    high, low = (buffer.to(DEVICE) for buffer in encode_split(torch.randn(numel, generator=generator)))
    states = [high.view(torch.bfloat16), low, *torch.zeros(2, numel, device=DEVICE).unbind()]
    exact = decode_split(high, low).double().requires_grad_()
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)([exact], **options)
    for step in (1, 2, 3):
        gradient = torch.randn(numel, generator=generator).to(DEVICE)
        adamw_split_(*states, gradient, *step_of(AdamWHyper(**options, step=step, adam_w_mode=adam_w_mode), scale))
        exact.grad = gradient.double() * scale
        optimizer.step()
    # Three steps of at most ten fp32 roundings each, on weights of about 1 and updates of about lr.
    torch.testing.assert_close(decode_split(*states[:2]).double(), exact.detach(), rtol=1e-6, atol=1e-6)
    for name, moment in zip(("exp_avg", "exp_avg_sq"), states[2:], strict=True):
        torch.testing.assert_close(moment.double(), optimizer.state[exact][name], rtol=1e-6, atol=1e-7)


def test_writes_nothing_beyond_the_end() -> None:
    whole = split_states(BLOCK, torch.bfloat16)
    before = [state.clone() for state in whole]
    adamw_split_(*(state[64:81] for state in whole), *step_of(AdamWHyper(lr=1e-3)))
    for state, old in zip(whole[:4], before[:4], strict=True):
        changed = (bits(state) != bits(old)).nonzero().flatten().tolist()
        assert set(changed) <= set(range(64, 81))
    assert not torch.equal(bits(whole[2]), bits(before[2]))


def test_keeps_nan_and_infinity_apart_from_numbers() -> None:
    *states, gradient = split_states(64, torch.bfloat16)
    gradient[3], gradient[5] = float("nan"), float("inf")
    adamw_split_(*states, gradient, *step_of(AdamWHyper(lr=1e-3)))
    assert torch.isnan(states[0][3]) and torch.isnan(states[0][5])
    others = [index for index in range(64) if index not in (3, 5)]
    assert torch.isfinite(states[0][others]).all()


def test_every_low_half_is_kept() -> None:
    """With and without a tie (0x8000), below even and odd upper halves; the largest numbers, infinity and NaN too."""
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    every, some = torch.tensor([0x3F80, 0xBF81]), torch.tensor([0x0080, 0x3F81, 0x7F7F, 0x7F80, 0xBF80])
    pairs = ((every, torch.arange(1 << 16)), (some, edges))
    bits32 = torch.cat([((uppers << 16)[:, None] + lows).flatten() for uppers, lows in pairs])
    masters = torch.where(bits32 >= 1 << 31, bits32 - (1 << 32), bits32).int().view(torch.float32).to(DEVICE)
    high, low = encode_split(masters)
    states = [high.view(torch.bfloat16).clone(), low.clone(), *torch.zeros(2, len(masters), device=DEVICE).unbind()]
    adamw_split_(*states, torch.zeros_like(masters), *step_of(AdamWHyper(lr=0.0)))
    number = ~masters.isnan()  # a GPU's arithmetic gives every NaN the same bits
    assert states[0][~number].isnan().all()
    assert_same_bits([state[number] for state in states[:2]], [high.view(torch.bfloat16)[number], low[number]])
    assert torch.equal(bits(decode_split(*states[:2])[number]), bits(masters[number]))


@pytest.mark.parametrize("upper_half", [0x3F80, 0x3F81])
def test_an_update_that_lands_on_a_tie_is_kept(upper_half: int) -> None:
    """A step of 2^-9 onto 1.0 (or its odd neighbour) and half a unit of bf16: no reference has the last word here."""
    target = torch.full((40,), (upper_half << 16) + 0x8000, dtype=torch.int32).view(torch.float32).to(DEVICE)
    high, low = encode_split(target + 2.0**-9)
    states = [high.view(torch.bfloat16), low, *torch.zeros(2, 40, device=DEVICE).unbind()]
    # With beta1 = beta2 = 0, eps = 0 and no bias correction the update is lr * sign(gradient).
    hyper = AdamWHyper(lr=2.0**-9, betas=(0.0, 0.0), eps=0.0, bias_correction=False)
    adamw_split_(*states, torch.ones_like(target), *step_of(hyper))
    assert (states[0].view(torch.int16) == upper_half + 1).all() and (states[1] == -0x8000).all()
    assert torch.equal(decode_split(*states[:2]), target)


def test_no_elements() -> None:
    adamw_split_(*split_states(0, torch.bfloat16), *step_of(AdamWHyper(lr=1e-3)))


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (
            0,
            lambda buffer: buffer.half(),
            r"weight must be flat, contiguous and torch\.bfloat16, but it is torch\.float",
        ),
        (1, lambda buffer: buffer.int(), r"remainder must be .* torch\.int16, but it is torch\.int32"),
        (2, lambda buffer: buffer.double(), r"exp_avg must be .* torch\.float32, but it is torch\.float64"),
        (3, lambda buffer: buffer.repeat(2)[::2], r"exp_avg_sq must be .* of shape \[8\] and strides \[2\]"),
        (4, lambda buffer: buffer.view(2, 4), r"gradient must be flat.* of shape \[2, 4\]"),
        (4, lambda buffer: buffer.int(), r"gradient must be .* torch\.bfloat16 or torch\.float16 or torch\.float32"),
        (4, lambda buffer: buffer[:7], "gradient has 7 elements .*, but the weight has 8"),
        (2, lambda buffer: buffer.to("meta"), "exp_avg has 8 elements on meta"),
        (0, lambda buffer: buffer.clone().requires_grad_(), "weight requires grad"),
    ],
)
def test_refusals(index: int, wrong, message: str) -> None:
    states = split_states(8, torch.bfloat16)
    before = [state.clone() for state in states]
    given = [*states[:index], wrong(states[index]), *states[index + 1 :]]
    with pytest.raises(SlideError, match=f"adamw_split_: {message}"):
        adamw_split_(*given, *step_of(AdamWHyper(lr=1e-3)))
    assert_same_bits(states, before)


@pytest.mark.parametrize("numel", [0, 70])
def test_the_operator_is_registered_well(numel: int) -> None:
    constants, adam_w_mode = step_of(AdamWHyper(lr=1e-3, weight_decay=0.1, step=3), 0.5)
    arguments = (*split_states(numel, torch.bfloat16), list(constants), adam_w_mode)
    torch.library.opcheck(torch.ops.ds_slide.adamw_split_, arguments)


def test_torch_compile_goes_through() -> None:
    hyper = AdamWHyper(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, step=5, adam_w_mode=False)
    constants, adam_w_mode = step_of(hyper, 0.37)

    def halved(*tensors: torch.Tensor) -> torch.Tensor:
        adamw_split_(*tensors, constants, adam_w_mode)
        return tensors[0] / 2

    expected = split_states(1031, torch.bfloat16)
    found = [state.clone() for state in expected]
    result = torch.compile(halved, fullgraph=True, backend="aot_eager")(*found)
    # Unusual numbers, each different: two that changed places on the way into the operator would show.
    assert_same_bits([result], [halved(*expected)])
    assert_same_bits(found, expected)
