"""The loss without logits: when they are computed after all, and that nothing is wrong where they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import BATCH, DEVICE, HIDDEN, LENGTH, VOCABULARY, assert_close, batch, build, loss_and_gradients, twin
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.patching.apply import apply_kernels
from ds_slide.patching.head import LossLinear
from ds_slide.patching.pending import HeadCall, PendingLogits

TOLERANCE = 2e-5


def pair(family: str = "llama", **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model and its twin with the loss kernel."""
    plain = build(family, **options)
    model = twin(plain)
    assert dict(apply_kernels(model, ["loss"]).counts) == {"loss": 1}
    return plain, model


def test_evaluation_and_training_without_labels_have_their_logits_to_the_bit() -> None:
    plain, model = pair()
    data = batch()
    for mode in (True, False):
        arguments = {"input_ids": data["input_ids"]} if mode else data
        found, expected = model.train(mode)(**arguments), plain.train(mode)(**arguments)
        assert type(found.logits) is torch.Tensor
        assert torch.equal(found.logits, expected.logits)
        assert mode or torch.equal(found.loss, expected.loss)


def test_logits_that_are_read_in_training_are_the_true_ones_with_their_graph() -> None:
    plain, model = pair()
    found, expected = model(**batch()), plain(**batch())
    assert isinstance(found.logits, PendingLogits) and found.logits.requires_grad
    assert found.logits.shape == expected.logits.shape and found.logits.device == expected.logits.device
    assert found.logits.grad_fn is not None and found.logits.dtype == torch.float32 and len(found.logits) == BATCH
    assert "PendingLogits" in repr(found.logits)
    assert found.logits.made is None  # so far nobody needed the numbers
    with torch.no_grad():
        assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
    for output in (found, expected):
        (
            output.loss + 0.1 * output.logits.square().mean() + torch.cat([output.logits, output.logits]).mean()
        ).backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_hooks_on_logits_see_the_gradient_of_what_was_read() -> None:
    _, model = pair()
    output, seen = model(**batch()), []
    output.logits.register_hook(lambda gradient: seen.append(gradient.shape))
    assert output.logits.made is None
    (output.loss + output.logits.sum()).backward()
    assert seen == [(BATCH, LENGTH, VOCABULARY)]


def test_hooks_of_logits_do_not_see_the_gradient_of_a_loss_that_was_made_from_them() -> None:
    """The engine's hook on the logits would change a gradient that the hook on the loss has changed already."""
    _, model = pair()
    source = HeadCall(model.lm_head, torch.randn(BATCH, HIDDEN, device=DEVICE, requires_grad=True))
    logits = PendingLogits(source, (BATCH, VOCABULARY), torch.float32, torch.device(DEVICE))
    loss, seen = logits.float().exp().sum(), []
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    logits.detach().sum()  # computes them, with the hook
    loss.backward(retain_graph=True)
    assert seen == []
    (loss + logits.sum()).backward()
    assert seen == [(BATCH, VOCABULARY)]


def test_logits_are_gone_after_backward() -> None:
    _, model = pair()
    output = model(**batch())
    output.loss.backward()
    assert output.logits.shape == (BATCH, LENGTH, VOCABULARY)
    with pytest.raises(SlideError, match=r"its backward has begun.*leave \"loss\" out of ds_slide\.kernels"):
        output.logits.sum()


def test_logits_are_gone_when_the_head_was_updated_or_is_away() -> None:
    _, model = pair()
    output = model(**batch())
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(SlideError, match="the head was updated"):
        output.logits.sum()
    output = model(**batch())
    model.lm_head.weight.data = torch.empty(0, device=DEVICE)
    with pytest.raises(SlideError, match="the head's weight is not here"):
        output.logits.sum()


def test_below_autograd_logits_are_never_taken_for_constants() -> None:
    _, model = pair()
    logits = model(**batch()).logits
    with torch._C.DisableTorchFunctionSubclass():
        with pytest.raises(SlideError, match="never computed"):
            torch.exp(logits)
        with torch.no_grad():
            assert torch.exp(logits).isfinite().all()


OTHER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "items": {"num_items_in_batch": 7},
    "tensor of items": {"num_items_in_batch": torch.tensor(9, device=DEVICE)},
    "ignore index": {"ignore_index": 5, "labels": torch.arange(BATCH * LENGTH, device=DEVICE).view(BATCH, LENGTH) % 7},
    "shifted": {"shift_labels": torch.arange(BATCH * LENGTH, device=DEVICE).view(BATCH, LENGTH)},
    "unread": {"output_attentions": False, "seq_idx": None},
}


@pytest.mark.parametrize("arguments", OTHER_ARGUMENTS.values(), ids=OTHER_ARGUMENTS)
def test_arguments_of_the_loss(arguments: dict[str, Any]) -> None:
    plain, model = pair()
    assert_close(loss_and_gradients(model, **arguments), loss_and_gradients(plain, **arguments), TOLERANCE)
    assert isinstance(model(**(batch() | arguments)).logits, PendingLogits)


def test_an_unknown_argument_takes_the_original_loss(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = pair()
    found = loss_and_gradients(model, surprise=1)
    expected = loss_and_gradients(plain, surprise=1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "the loss was called with surprise" in caplog.text


def test_what_the_model_does_to_its_logits_is_in_the_loss() -> None:
    from transformers import LlamaForCausalLM

    class Suppressing(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            logits[..., 3] = -20.0
            return logits, self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)

    class Scaling(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state) / 3.0
            return logits, self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)

    for kind in (Suppressing, Scaling):
        plain = build("llama")
        plain.__class__ = kind
        model = twin(plain)
        apply_kernels(model, ["loss"])
        (logits, found), (_, expected) = model(**batch()), plain(**batch())
        assert isinstance(logits, PendingLogits)  # it was one when the head returned
        assert torch.equal(found, expected)


def test_steps_before_the_loss_are_exactly_the_operations() -> None:
    head = nn.Linear(8, 11, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(3, 8, device=DEVICE, dtype=torch.bfloat16)
    logits = PendingLogits(HeadCall(head, hidden), (3, 11), torch.bfloat16, hidden.device)
    real = head(hidden)
    capped = torch.tanh(logits / 4.0).float() * 4.0
    assert isinstance(capped, PendingLogits) and capped.dtype == torch.float32 and capped.softcap() == 4.0
    assert torch.equal(capped.materialise(), torch.tanh(real / 4.0).float() * 4.0)
    assert (logits / 4.0).softcap() is False
    assert (torch.tanh(logits / 4.0) * 3.0).softcap() is False
    assert logits.to(torch.float16).softcap() is None
    added = logits + 1
    assert type(added) is torch.Tensor and torch.equal(added, real + 1)


def test_autocast_computes_in_its_dtype() -> None:
    plain, model = pair()
    with torch.autocast(DEVICE, torch.bfloat16):
        found, expected = model(**batch()), plain(**batch())
        assert found.logits.dtype == expected.logits.dtype == torch.bfloat16
    torch.testing.assert_close(found.loss, expected.loss, rtol=2e-3, atol=0)
    assert torch.equal(found.logits.float(), expected.logits.float())  # read outside of autocast
    found.loss.backward()
    expected.loss.backward()
    error = (model.lm_head.weight.grad - plain.lm_head.weight.grad).norm() / plain.lm_head.weight.grad.norm()
    assert error < 2e-2


def test_a_deep_copy_of_a_patched_model_stands_for_itself() -> None:
    plain, model = pair()
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert_close(loss_and_gradients(other), loss_and_gradients(plain), TOLERANCE)
    assert isinstance(other(**batch()).logits, PendingLogits)
    assert not isinstance(other.eval()(**batch()).logits, PendingLogits)


def test_the_head_is_called_as_a_module_for_the_loss() -> None:
    plain, model = pair()
    calls = []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.lm_head.register_full_backward_hook(lambda _, gradients, __: calls.append(gradients[0].shape))
    assert_close(loss_and_gradients(model), loss_and_gradients(plain), TOLERANCE)
    assert calls == ["before", (BATCH, LENGTH, HIDDEN)]
    assert isinstance(model.lm_head, nn.Linear) and type(model.lm_head) is LossLinear
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_forward_hook_of_the_head_sees_logits() -> None:
    _, model = pair()
    seen = []
    model.lm_head.register_forward_hook(lambda _, __, output: seen.append(output.shape))
    assert not isinstance(model(**batch()).logits, PendingLogits)
    assert seen == [(BATCH, LENGTH, VOCABULARY)]


def test_a_wrapper_may_call_forward_without_the_hooks_of_the_model() -> None:
    plain, model = pair()
    data = batch()
    found = model.forward(data["input_ids"], None, None, None, None, data["labels"])  # labels by position
    assert isinstance(found.logits, PendingLogits)
    torch.testing.assert_close(found.loss, plain(**data).loss, rtol=1e-5, atol=0)


def test_gradient_checkpointing_of_the_blocks() -> None:
    plain, model = pair()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(loss_and_gradients(model), loss_and_gradients(plain), TOLERANCE)


def test_models_without_a_causal_loss_keep_theirs() -> None:
    from transformers import LlamaForSequenceClassification

    plain = build("llama")
    model = LlamaForSequenceClassification(plain.config)
    assert "not nn.Linear" in apply_kernels(model, ["loss"]).reasons["loss"]
    assert "no module has a loss function" in apply_kernels(nn.Linear(3, 3), ["loss"]).reasons["loss"]
    plain.loss_function = lambda logits, **_: logits.mean()
    assert "is not ForCausalLMLoss" in apply_kernels(plain, ["loss"]).reasons["loss"]
    assert "loss_function" not in plain.__dict__ and type(plain.lm_head) is nn.Linear
