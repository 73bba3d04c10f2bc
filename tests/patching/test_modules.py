"""Which modules are recognised, which are not and why, and that patches come and go without a trace."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from models import ALL, DEVICE, FAMILIES, assert_close, batch, build, loss_and_gradients, twin
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ds_slide.errors import SlideConfigError
from ds_slide.patching.apply import apply_kernels
from ds_slide.patching.kinds import KINDS, gains_on, replace_forward, resolve_kinds, runs_on
from ds_slide.patching.norms import RmsForm, find_rms_form


class Rms(nn.Module):
    """A norm whose last step is given."""

    def __init__(self, finish: Callable[..., torch.Tensor], size: int = 24) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = 1e-5
        self.finish = finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.finish(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps), self.weight, x)


NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "early rounding": lambda n, w, x: w * n.to(x.dtype),
    "late rounding": lambda n, w, x: (n * w.float()).to(x.dtype),
    "one added, late": lambda n, w, x: (n * (1.0 + w.float())).to(x.dtype),
    "one added, early": lambda n, w, x: n.to(x.dtype) * (1.0 + w),
}
OTHERS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "scaled": (lambda n, w, x: 1.001 * w * n.to(x.dtype), "something else"),
    "half added": (lambda n, w, x: n.to(x.dtype) * (0.5 + w), "something else"),
    "other dtype": (lambda n, w, _: n * w.float(), "does not return what it is given"),
    "other shape": (lambda n, w, x: (w * n.to(x.dtype))[:-1], "does not return what it is given"),
    "refuses": (lambda n, w, _: n @ w @ w @ w, "could not be tried: RuntimeError"),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_form_of_rms_norm_is_found(name: str) -> None:
    torch.manual_seed(5)  # where a bf16 rounding of the norm flips, two more roundings can exceed the tolerance
    norm = Rms(NORMS[name]).to(DEVICE)
    form = find_rms_form(norm, (24,))
    assert isinstance(form, RmsForm)
    assert (form.weight_offset == 1.0, form.round_before_weight) == ("one added" in name, "early" in name)
    x = torch.randn(5, 24, device=DEVICE)
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2**-6)):
        norm, x = norm.to(dtype), x.to(dtype)
        expected = norm(x)
        replaced = apply_kernels(norm, ["norm"])
        assert dict(replaced.counts) == {"norm": 1}
        torch.testing.assert_close(norm(x), expected, rtol=rounding, atol=1e-6)
        replaced.undo()


@pytest.mark.parametrize(("finish", "reason"), OTHERS.values(), ids=OTHERS)
def test_another_norm_stays_as_it_is(finish: Callable[..., torch.Tensor], reason: str) -> None:
    norm = Rms(finish)
    replaced = apply_kernels(norm, ["norm"])
    assert not replaced.counts and reason in replaced.reasons["norm"]
    assert "forward" not in norm.__dict__


def test_each_instance_is_judged_by_its_settings() -> None:
    norms = nn.ModuleList(Rms(NORMS["early rounding"]) for _ in range(3))
    norms[1].eps, norms[2].eps = 0.5, 3  # an epsilon that is no fraction is no epsilon
    replaced = apply_kernels(norms, ["norm"])
    assert dict(replaced.counts) == {"norm": 2} and "Rms has no epsilon" in replaced.reasons["norm"]
    x = torch.randn(4, 24, device=DEVICE)
    norms.to(DEVICE)
    torch.testing.assert_close(norms[1](x), type(norms[1]).forward(norms[1], x))


def test_layer_norms_by_their_class() -> None:
    class Own(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    norms = nn.ModuleList(
        [nn.LayerNorm(24), nn.LayerNorm(24, elementwise_affine=False), Own(24), nn.LayerNorm((2, 24))]
    )
    replaced = apply_kernels(norms, ["norm"])
    assert ["forward" in norm.__dict__ for norm in norms] == [True, True, False, False]
    assert "Own is a LayerNorm with a forward of its own" in replaced.reasons["norm"]
    norms.to(DEVICE)
    x = torch.randn(4, 24, device=DEVICE)
    torch.testing.assert_close(norms[1](x), functional.layer_norm(x, (24,)))


def test_weights_are_neither_read_nor_needed() -> None:
    """As under DeepSpeed's zero.Init, and for blocks that are not on the device."""
    model = build("qwen3")
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0, device=DEVICE)
    assert dict(apply_kernels(model, ALL).counts) == FAMILIES["qwen3"][2]


def test_dtypes_that_do_not_fit_run_the_original() -> None:
    norm = Rms(NORMS["early rounding"]).to(DEVICE)
    x = torch.randn(4, 24, device=DEVICE)
    expected = {dtype: norm(x.to(dtype)) for dtype in (torch.bfloat16, torch.float64)}
    apply_kernels(norm, ["norm"])
    assert all(torch.equal(norm(x.to(dtype)), value) for dtype, value in expected.items())
    torch.testing.assert_close(norm(x=x), norm(x))  # by keyword too


class Mlp(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 40, bias=bias), nn.Linear(16, 40, bias=bias)
        self.down_proj = nn.Linear(40, 16, bias=bias)
        self.act_fn = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("activation", "found"),
    [
        (functional.silu, True),
        (functional.gelu, True),
        (functools.partial(functional.gelu, approximate="tanh"), True),
        (lambda x: functional.gelu(x).clamp(-10, 10), False),
        (functional.relu, False),
        (lambda x: x * torch.sigmoid(1.702 * x), False),
    ],
    ids=["silu", "gelu", "gelu tanh", "clipped gelu", "relu", "quick gelu"],
)
def test_gated_modules_by_what_they_compute(activation: Callable[..., torch.Tensor], found: bool) -> None:
    module = Mlp(activation).to(DEVICE)
    x = torch.randn(6, 16, device=DEVICE)
    expected = module(x)
    replaced = apply_kernels(module, ["mlp"])
    assert dict(replaced.counts) == ({"mlp": 1} if found else {})
    if not found:
        assert "something else than down(act(gate) * up)" in replaced.reasons["mlp"]
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)


class TiledMlp(Mlp):
    """As DeepSpeed's page patches it, to save the memory of all but one tile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def of_tile(mlp: Mlp, tile: torch.Tensor) -> torch.Tensor:
            return Mlp.forward(mlp, tile)

        y: torch.Tensor = TiledMLP.apply(of_tile, self, x, 2, [])
        return y


def test_an_mlp_in_tiles_stays_in_tiles() -> None:
    replaced = apply_kernels(TiledMlp(functional.silu).to(DEVICE), ["mlp"])
    assert not replaced.counts
    assert "computes in an autograd function of its own" in replaced.reasons["mlp"]


def test_the_projections_are_called_as_modules() -> None:
    module, called = Mlp(functional.silu).to(DEVICE), []
    apply_kernels(module, ["mlp"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(module, name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    module(torch.randn(2, 16, device=DEVICE))
    assert called == ["gate_proj", "up_proj", "down_proj"]


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def half(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    return q * cos + half(q) * sin, k * cos + half(k) * sin


class Attention(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any, **kwargs: Any) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin, **kwargs)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    forward = decorated(decorated(Attention.forward))


class Uncopyable(nn.Module):
    @functools.wraps(Attention.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Attention.forward(self, *args, **kwargs)


def rotary_inputs() -> tuple[torch.Tensor, ...]:
    """As many heads as positions, so that the shapes do not tell in which dimension the positions are."""
    q, k = torch.randn(2, 5, 5, 8, device=DEVICE), torch.randn(2, 5, 5, 8, device=DEVICE)
    angles = torch.randn(2, 5, 4, device=DEVICE).repeat(1, 1, 2)
    return q, k, angles.cos(), angles.sin()


@pytest.mark.parametrize("attention", [Attention, Decorated])
def test_rotary_embedding_of_one_object(attention: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_slide.kernels.rope import rotary as kernel

    calls, rope = [], kernel.rope
    monkeypatch.setattr(kernel, "rope", lambda *args: calls.append(1) or rope(*args))
    module, other = attention(), attention()
    assert dict(apply_kernels(module, ["rope"]).counts) == {"rope": 1}
    inputs = rotary_inputs()
    for found, expected in zip(module(*inputs), other(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1  # by the patched module only
    for found, expected in zip(module(*inputs, unsqueeze_dim=2), other(*inputs, unsqueeze_dim=2), strict=True):
        assert torch.equal(found, expected)
    half = [value[..., :4] for value in rotary_inputs()[2:]]
    with pytest.raises(RuntimeError, match="size of tensor"):  # what the original says: it knows no partial rotation
        module(*inputs[:2], *half)
    assert len(calls) == 1


def test_a_decorator_that_cannot_be_copied_is_left_alone() -> None:
    assert "has a decorator that cannot be copied" in apply_kernels(Uncopyable(), ["rope"]).reasons["rope"]


def test_another_rotary_embedding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        def turn(x: torch.Tensor) -> torch.Tensor:
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

        return tuple(x * cos.unsqueeze(1) + turn(x) * sin.unsqueeze(1) for x in (q, k))

    monkeypatch.setitem(Attention.forward.__globals__, "apply_rotary_pos_emb", interleaved)
    replaced = apply_kernels(Attention(), ["rope"])
    assert not replaced.counts and "does not rotate halves" in replaced.reasons["rope"]


def test_a_second_call_replaces_nothing_and_its_undo_takes_nothing_away() -> None:
    model = build("llama")
    first = apply_kernels(model, ALL)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    second = apply_kernels(model, ALL)
    assert not second.counts and set(second.reasons.values()) == {"it was replaced before"}
    second.undo()
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    first.undo()
    first.undo()
    assert dict(apply_kernels(model, ALL).counts) == FAMILIES["llama"][2]


def test_undo_under_a_wrapper_of_somebody_else() -> None:
    """Accelerate replaces `model.forward` by a bound wrapper of what it finds there."""
    model = build("llama")
    plain = twin(model)
    replaced = apply_kernels(model, ALL)
    inner = model.forward.__func__
    model.forward = types.MethodType(functools.wraps(inner)(lambda self, *a, **k: inner(self, *a, **k)), model)
    outer = model.forward
    replaced.undo()
    assert model.forward == outer
    found, expected = loss_and_gradients(model), loss_and_gradients(plain)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_forward_that_was_put_on_the_object_stays() -> None:
    norm = Rms(NORMS["early rounding"])
    replace_forward(norm, "test", lambda original: original)
    norm.forward = lambda x: x
    assert "was replaced before" in apply_kernels(norm, ["norm"]).reasons["norm"]


def test_the_signature_of_the_model_is_what_trainers_read() -> None:
    import inspect

    model = build("llama")
    before = inspect.signature(model.forward)
    apply_kernels(model, ALL)
    assert inspect.signature(model.forward) == before


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert resolve_kinds("auto", "cuda") == KINDS
    assert resolve_kinds("auto", "cpu") == resolve_kinds("off", "cuda") == ()
    assert resolve_kinds(["mlp", "loss"], "cuda") == ("loss", "mlp")
    with pytest.raises(SlideConfigError, match=r"asks for norm, but there is no GPU; set ds_slide\.kernels to"):
        resolve_kinds(["norm"], "cpu")
    with pytest.raises(SlideConfigError, match='names "head"; the kinds are loss, norm, rope, mlp'):
        resolve_kinds(["head"], "cuda")  # type: ignore[list-item]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_kinds("auto", "cpu") == ()
    assert resolve_kinds(["norm"], "cpu") == ("norm",)


def test_off_touches_nothing() -> None:
    model = build("llama")
    replaced = apply_kernels(model, "off")
    assert not replaced.counts and not replaced.reasons
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_batches_of_other_shapes_and_evaluation() -> None:
    model = build("llama")
    plain = twin(model)
    apply_kernels(model, ALL)
    data = {name: value[:1, :5] for name, value in batch().items()}
    assert_close(loss_and_gradients(model, **data), loss_and_gradients(plain, **data), 2e-5)
    with torch.no_grad():
        found, expected = model.eval()(**data).logits, plain.eval()(**data).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_patched_modules_compile_into_one_graph() -> None:
    x = torch.randn(4, 16, device=DEVICE)
    cases = [(Rms(NORMS["early rounding"], 16), (x,)), (Mlp(functional.silu), (x,)), (Attention(), rotary_inputs())]
    for module, inputs in cases:
        expected = module.to(DEVICE)(*inputs)
        assert sum(apply_kernels(module, ALL).counts.values()) == 1
        found = torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_token_in_generation_is_left_to_the_module() -> None:
    with FakeTensorMode(), torch.no_grad():
        token = torch.empty(8, 1, 1536, device="cuda", dtype=torch.bfloat16)
        query = torch.empty(8, 12, 1, 128, device="cuda", dtype=torch.bfloat16)
        assert runs_on(token) and not gains_on(token)
        assert runs_on(query) and not gains_on(query, 2)
        assert gains_on(torch.empty(8, 2, 1536, device="cuda", dtype=torch.bfloat16))
        with torch.enable_grad():
            assert gains_on(token)
