"""Every family: what is replaced, and that loss and gradients stay what they were."""

from __future__ import annotations

import pytest
import torch
from models import ALL, FAMILIES, assert_close, build, loss_and_gradients, twin

from ds_slide.patching.apply import apply_kernels

# Relative errors of whole tensors; bf16 has 8 bits, and the model rounds where the kernels do not.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_model_without_kernels(family: str, dtype: torch.dtype) -> None:
    plain = build(family, dtype)
    model = twin(plain)
    expected = loss_and_gradients(plain)
    replaced = apply_kernels(model, ALL)
    assert dict(replaced.counts) == FAMILIES[family][2]
    assert replaced.reasons.keys() == set(ALL) - replaced.counts.keys()
    assert_close(loss_and_gradients(model), expected, TOLERANCES[dtype])

    # The class and every other model of it are as before, to the bit.
    again = loss_and_gradients(plain)
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    replaced.undo()
    undone = loss_and_gradients(model)
    assert all(torch.equal(undone[name], value) for name, value in expected.items())
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
