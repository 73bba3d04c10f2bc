"""Scripts that say themselves where an accumulation window ends: unmanaged, or as one coalesced reduction."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Result, batches, differences, ds_config, engine_for, llama, states_of, train, trained

from ds_slide.errors import SlideError

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]

WINDOWS = (2, 3, 1, 2)
# Weights of bf16 differ by single roundings after the first update (see test_parity.py).
TOLERANCE = 2.0**-9
CLIPPING = pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "none"])


def unmanaged(slide: dict[str, Any] | None, windows: tuple[int, ...], clip: float, **others: Any) -> Result:
    """As many micro-batches before each step as `windows` says."""
    config = ds_config(slide, clip=clip, managed_gradient_accumulation=False, **others)
    result, data = Result(), iter(batches(sum(windows)))
    model = llama()
    with engine_for(model, config) as engine:
        for window in windows:
            for _ in range(window):
                loss = engine(**next(data)).loss
                engine.backward(loss)
                result.losses.append(loss.item())
            engine.step()
            result.norms.append(float(engine.get_global_grad_norm()))
        assert engine.global_steps == len(windows)
        assert engine.global_samples == sum(windows) * engine.train_micro_batch_size_per_gpu()
        result.states = states_of(model)
    return result


@CLIPPING
def test_unmanaged_windows_of_any_length_follow_stock(clip: float) -> None:
    ours, stock = unmanaged({}, WINDOWS, clip), unmanaged(None, WINDOWS, clip)
    assert ours.losses == pytest.approx(stock.losses, abs=TOLERANCE)
    assert ours.norms == pytest.approx(stock.norms, rel=0.01)


@CLIPPING
def test_unmanaged_windows_of_one_length_are_managed_ones_to_the_bit(clip: float) -> None:
    managed = trained(llama(), ds_config({}, clip=clip, accumulation=2), batches(6))
    assert differences(unmanaged({}, (2, 2, 2), clip, gradient_accumulation_steps=2), managed) == []


def test_unmanaged_windows_with_everything_on_ssd(disk: Any) -> None:
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    on_ssd = unmanaged({"host_memory": 0}, WINDOWS, 1.0, zero_optimization=zero)
    assert differences(on_ssd, unmanaged({}, WINDOWS, 1.0)) == []


def coalesced(slide: dict[str, Any] | None, clip: float = 1.0) -> Result:
    result, data = Result(), iter(batches(sum(WINDOWS)))
    model = llama()
    with engine_for(model, ds_config(slide, clip=clip)) as engine:
        for window in WINDOWS:
            with engine.coalesce_grad_reduction():
                for _ in range(window):
                    loss = engine(**next(data)).loss
                    engine.backward(loss)
                    result.losses.append(loss.item())
            engine.step()
            result.norms.append(float(engine.get_global_grad_norm()))
        result.states = states_of(model)
    return result


def test_a_coalesced_reduction_follows_stock() -> None:
    ours, stock = coalesced({}), coalesced(None)
    assert ours.losses == pytest.approx(stock.losses, abs=TOLERANCE)
    assert ours.norms == pytest.approx(stock.norms, rel=0.01)
    assert differences(ours, unmanaged({}, WINDOWS, 1.0)) == []


def test_a_coalesced_reduction_with_states_on_the_gpu() -> None:
    """No backward is known to be the last one, so the norm has no sum from a backward."""
    assert differences(coalesced({"gpu_states": "1GiB"}), coalesced({})) == []


def test_a_coalesced_reduction_needs_held_gradients() -> None:
    with engine_for(llama(), ds_config({}, clip=0.0)) as engine:
        refusal = pytest.raises(SlideError, match=r'^engine.coalesce_grad_reduction\(\) .* {"defer_updates": true}')
        with refusal, engine.coalesce_grad_reduction():
            pass
        train(engine, batches(2))  # the engine is as it was
    held = coalesced({"defer_updates": True}, clip=0.0)
    assert held.losses == pytest.approx(coalesced(None, clip=0.0).losses, abs=TOLERANCE)
