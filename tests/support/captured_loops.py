"""Training loops as people write them, around blocks that replay recordings. Each trains until all blocks replay, and
then does something else."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_runs import layers_of
from captured_runs import RECORDING, STEPS, Train, captures_of
from harness import LAYERS, Batch, Result, batches, train

from ds_slide.runtime.captured.captures import Phase
from ds_slide.runtime.captured.shapes import STEADY


def two_forwards(engine: Any) -> Result:
    """The second forward begins before the backward of the first one."""
    result = train(engine, batches(STEPS))
    for first, second in zip(batches(2, seed=5), batches(2, seed=6), strict=True):
        loss = engine(**first).loss + engine(**second).loss
        engine.backward(loss)
        engine.step()
        result.losses.append(loss.item())
    return result


def two_backwards(engine: Any) -> Result:
    """A graph is kept for a second backward."""
    result = train(engine, batches(STEPS))
    loss = engine(**batches(1, seed=7)[0]).loss
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    return result


def dropped_graphs(engine: Any) -> Result:
    """Forwards without a backward, and evaluations between forward and backward."""
    result = train(engine, batches(STEPS))
    for batch in batches(2, seed=8):
        engine(**batch)
        loss = engine(**batch).loss
        with torch.no_grad():
            result.losses.append(engine(**batches(1, seed=9)[0]).loss.item())
        engine.backward(loss)
        engine.step()
    return result


def changed_attribute(engine: Any) -> Result:
    """A value that the forward reads is changed by the script."""
    result = train(engine, batches(STEPS))
    for layer in layers_of(engine.module):
        layer.self_attn.scaling = 0.1
    result.losses += train(engine, batches(2, seed=10)).losses
    return result


def frozen_later(engine: Any) -> Result:
    """A weight is frozen, and trained again."""
    result = train(engine, batches(STEPS))
    weight = layers_of(engine.module)[2].mlp.up_proj.weight
    for trained in (False, True):
        weight.requires_grad_(trained)
        result.losses += train(engine, batches(2, seed=11)).losses
    return result


def hooked_later(engine: Any) -> Result:
    """A hook inside of a block, which is called in each forward from then on."""
    result, seen = train(engine, batches(STEPS)), []
    handle = layers_of(engine.module)[1].mlp.register_forward_hook(lambda *call: seen.append(call[2].sum().item()))
    result.losses += train(engine, batches(2, seed=12)).losses
    handle.remove()
    result.losses += train(engine, batches(1, seed=13)).losses
    assert len(set(seen)) == 2
    result.losses += sorted(set(seen))  # a recomputation calls it again
    return result


def masked(engine: Any) -> Result:
    """Batches of one shape with a mask, and without."""
    result = train(engine, batches(STEPS))
    for batch in batches(3, seed=14):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, :5] = 0
        given: Batch = {**batch, "attention_mask": mask}
        result.losses += train(engine, [given, batch]).losses
    return result


def gradients_between(engine: Any) -> Result:
    """A script reads hidden states of two micro-batches, which later replays must not change."""
    result = train(engine, batches(STEPS))
    kept = []
    for batch in batches(2, seed=15):
        output = engine(**batch, output_hidden_states=True)
        kept += [each.detach() for each in output.hidden_states]
        engine.backward(output.loss)
        engine.step()
    result.losses += [each.double().sum().item() for each in kept]
    return result


def gradients_of_inputs(engine: Any) -> Result:
    """A gradient of the embeddings alone (saliency, adversarial noise), which gives the weights none."""
    result = train(engine, batches(STEPS))
    for batch in batches(2, seed=16):
        given = engine.module.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        loss = engine(inputs_embeds=given, labels=batch["labels"]).loss
        (gradient,) = torch.autograd.grad(loss, given)
        result.losses.append(gradient.double().square().sum().item())
        result.losses += train(engine, [batch]).losses
    return result


def hooked_weights(engine: Any) -> Result:
    """Hooks of weights, registered late."""
    result, seen = train(engine, batches(STEPS)), []
    layers = layers_of(engine.module)
    handle = layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 0.5)
    layers[2].mlp.up_proj.weight.register_hook(lambda gradient: seen.append(gradient))
    result.losses += train(engine, batches(2, seed=17)).losses
    handle.remove()
    result.losses += train(engine, batches(1, seed=18)).losses
    result.losses += [each.double().sum().item() for each in seen]
    return result


def interrupted(engine: Any) -> Result:
    """Ctrl-C in the step that records, and in a later one. What was recorded goes."""
    result, recorded = Result(), []
    data = batches(STEPS + 4)
    for number, batch in enumerate(data):
        if number in (RECORDING - 1, RECORDING + 1):
            inner = layers_of(engine.module)[3].mlp.act_fn
            written = inner.forward

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            inner.forward = interrupt
            with pytest.raises(KeyboardInterrupt):
                engine(**batch)
            inner.forward = written
            gc.collect()  # the exception holds the graph
        result.losses += train(engine, [batch]).losses
        recorded.append(len(captures_of(engine).recorded))
    if captures_of(engine).phase is not Phase.OFF:
        freed = recorded[RECORDING + 1 :]  # at the latest: the second exception takes the place of the first one
        assert recorded[-1] == LAYERS
        assert captures_of(engine).recomputes or not any(freed[:-1])
    return result


def loaded_checkpoint(engine: Any) -> Result:
    """A checkpoint is loaded behind the recording, and trained from."""
    result = train(engine, batches(STEPS))
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        result.losses += train(engine, batches(2, seed=16)).losses
        engine.load_checkpoint(folder)
    result.losses += train(engine, batches(3, seed=17)).losses
    return result


LOOPS = [
    two_forwards, two_backwards, dropped_graphs, changed_attribute, frozen_later, hooked_later, masked,
    gradients_between, gradients_of_inputs, hooked_weights, interrupted, loaded_checkpoint,
]  # fmt: skip


def between_forward_and_backward(do: Callable[[Any], Any], undo: Callable[[Any], Any], first: int = STEPS) -> Train:
    """Something that a script does then, from the step `first` on."""

    def training(engine: Any) -> Result:
        result = Result()
        for number, batch in enumerate(batches(STEPS + 3)):
            loss = engine(**batch).loss
            if number >= first:
                do(engine)
            engine.backward(loss)
            if number >= first:
                undo(engine)
            engine.step()
            result.losses.append(loss.item())
        return result

    return training


def scale(engine: Any) -> None:
    for layer in layers_of(engine.module):
        layer.written = layer.self_attn.scaling
        layer.self_attn.scaling = 0.1


def scale_back(engine: Any) -> None:
    for layer in layers_of(engine.module):
        layer.self_attn.scaling = vars(layer).pop("written")


def train_weight(trains: bool) -> Callable[[Any], Any]:
    return lambda engine: layers_of(engine.module)[2].mlp.up_proj.weight.requires_grad_(trains)


def evaluate(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        engine(**batches(1, seed=9)[0])
        engine.module.generate(batches(1)[0]["input_ids"][:, :4], max_new_tokens=3, pad_token_id=0)


def graphs_of_two_states(engine: Any) -> Result:
    """The backward of the newer graph records, where the block has its state of before again."""
    result = Result()
    for first, second in zip(batches(STEPS + 2), batches(STEPS + 2, seed=5), strict=True):
        scale(engine)
        older = engine(**first).loss
        scale_back(engine)
        newer = engine(**second).loss
        engine.backward(newer)
        engine.backward(older)
        engine.step()
        result.losses += [older.item(), newer.item()]
    return result


def in_turn(engine: Any) -> Result:
    """Two graphs, of one shape and of two, which have their backwards in either order."""
    result = train(engine, batches(STEPS))
    result.losses += train(engine, batches(STEPS, length=16)).losses
    for length in (32, 16):
        for first, second in zip(batches(2, seed=5), batches(2, seed=6, length=length), strict=True):
            losses = [engine(**first).loss, engine(**second).loss]
            for each in losses:
                engine.backward(each)
            engine.step()
            losses += [engine(**first).loss, engine(**second).loss]
            for each in losses[:1:-1]:
                engine.backward(each)
            engine.step()
            result.losses += [each.item() for each in losses]
    return result


def from_the_middle(engine: Any) -> Result:
    """A loss of hidden states alone, and one of hidden states and logits."""
    result = train(engine, batches(STEPS))
    for share in (0.0, 1.0, 0.0):
        output = engine(**batches(1, seed=5)[0], output_hidden_states=True)
        loss = output.hidden_states[3].float().square().mean()
        loss = loss + share * output.loss if share else loss
        engine.backward(loss)
        engine.step()
        result.losses.append(loss.item())
    return result


def raising(where: str) -> Train:
    """A script's hook raises in the middle of some forwards or backwards."""

    def fail(*_: Any) -> None:
        raise ValueError("of the script")

    def training(engine: Any) -> Result:
        result = train(engine, batches(STEPS))
        layer = layers_of(engine.module)[3]
        for batch in batches(3, seed=5):
            hooked: Any = (
                layer.register_forward_pre_hook if where == "forward" else layer.mlp.up_proj.weight.register_hook
            )
            handle = hooked(fail)
            with pytest.raises(ValueError, match="of the script"):
                engine.backward(engine(**batch).loss)
            handle.remove()
            engine.zero_grad()
            result.losses += train(engine, [batch]).losses
        return result

    return training


def in_autocast(engine: Any) -> Result:
    """Around some forwards, and around some backwards."""
    result = train(engine, batches(STEPS))
    for batch in batches(2, seed=4):
        for forward in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                loss = engine(**batch).loss
            with torch.autocast("cpu", torch.bfloat16, enabled=not forward):
                engine.backward(loss)
            engine.step()
            result.losses.append(loss.item())
    return result


def many_lengths(engine: Any) -> Result:
    """More than have recordings at a time."""
    result = train(engine, batches(STEPS))
    for length in (16, 24, 40, 48, 56, 20):
        result.losses += train(engine, batches(STEADY + 3, seed=length, length=length)).losses
        assert len(captures_of(engine).shapes.recorded) == (2 if captures_of(engine).phase is Phase.RECORDING else 0)
    return result


OTHER_LOOPS: dict[str, Train] = {
    "state changed before backward": between_forward_and_backward(scale, scale_back),
    "state changed before the backward that records": between_forward_and_backward(scale, scale_back, 0),
    "weight frozen before backward": between_forward_and_backward(train_weight(False), train_weight(True)),
    "evaluation before backward": between_forward_and_backward(evaluate, lambda engine: engine.train()),
    "graphs of two states": graphs_of_two_states,
    "backwards in turn": in_turn,
    "loss of a middle block": from_the_middle,
    "exceptions in forward": raising("forward"),
    "exceptions in backward": raising("backward"),
    "autocast": in_autocast,
    "many lengths": many_lengths,
}  # fmt: skip
