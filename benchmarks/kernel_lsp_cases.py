"""The kernels of LSP-Offload at the matrices of Qwen2.5-1.5B and 3B blocks: d is half of the shorter side, r = 4. A
matrix at a time, and the matrices of a unit in few launches, as the engine does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from kernel_cases import NO_LIGER, Makers
from kernel_problem import DTYPE, Factory, Problem, Results, System, random_tensor
from torch import Tensor

if TYPE_CHECKING:
    from ds_slide.compression.lsp.codec import Lsp

Matrices = tuple[tuple[int, int], ...]

NON_ZEROS = 4
DECAY, SCALE = 0.96875, -0.0625  # fp32 holds both
STEP_KEY = 7
"""Of the rounding."""


def block(hidden: int, intermediate: int, keys: int) -> Matrices:
    """Of a Qwen2 block: q, k, v, o, gate, up, down."""
    up, down = (intermediate, hidden), (hidden, intermediate)
    return ((hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), up, up, down)


BLOCKS = (block(1536, 8960, 256), block(2048, 11008, 256))
# Whole blocks, whose times are the overhead of one, then each of their matrices.
CASES: tuple[Matrices, ...] = (*BLOCKS, *(((matrix),) for one in BLOCKS for matrix in dict.fromkeys(one)))
TINY: tuple[Matrices, ...] = (((40, 24), (8, 70)), ((17, 33),))
TINY_UNITS: tuple[Matrices, ...] = (((40, 36), (34, 70)),)


def _name(matrices: Matrices) -> str:
    return " + ".join(f"{m} x {n}" for m, n in matrices)


def _pairs(matrices: Matrices, device: torch.device) -> list:
    from ds_slide.compression.lsp.projector import random_projector

    generator = torch.Generator().manual_seed(0)
    return [
        tuple(random_projector(rows, min(shape) // 2, NON_ZEROS, generator, device) for rows in shape)
        for shape in matrices
    ]


def compress(matrices: Matrices, device: torch.device) -> Problem:
    """The bound: read G, write S [d, d] in fp32."""
    pairs = _pairs(matrices, device)
    gradients = [random_tensor(*shape, device=device, scale=1e-3) for shape in matrices]

    def each(function: Callable[[int, Tensor], Tensor]) -> System:
        return lambda *given: tuple(function(number, gradient) for number, gradient in enumerate(given))

    def ours() -> System:
        from ds_slide.kernels.lsp.gather_sum import compress_

        outputs = [torch.empty(left.d, right.d, device=device) for left, right in pairs]

        def call(number: int, gradient: Tensor) -> Tensor:
            compress_(gradient, *pairs[number], outputs[number], False)
            return outputs[number]

        return each(call)

    def sparse() -> System:
        """torch's own sparse matrices, which take fp32."""
        lists = [[one.dense().T.to_sparse_csr() for one in pair] for pair in pairs]
        return each(lambda number, g: (lists[number][1] @ (lists[number][0] @ g.float()).T).T)

    def dense(dtype: torch.dtype) -> System:
        """As matrix products: 2 m d (n + d) operations, and the dense projectors in memory."""
        matrices = [[one.dense(dtype) for one in pair] for pair in pairs]
        return each(lambda number, g: matrices[number][0].T @ g.to(dtype) @ matrices[number][1])

    def reference() -> Results:
        return dict(zip(outputs, dense(torch.float64)(*gradients), strict=True))

    outputs = tuple(f"compressed {number}" for number in range(len(pairs)))
    systems: dict[str, Factory] = {"ours": ours, "torch": sparse, "eager": lambda: dense(DTYPE)}
    inputs = {f"gradient {number}": gradient for number, gradient in enumerate(gradients)}
    moved = sum(gradient.nbytes for gradient in gradients) + sum(4 * left.d * right.d for left, right in pairs)
    return Problem("lsp_compress", _name(matrices), inputs, outputs, systems, reference, moved, absent=NO_LIGER)


def apply(matrices: Matrices, device: torch.device) -> Problem:
    """The update of split masters. The bound: read and write both halves, read D [d, d] in fp32."""
    from ds_slide.optim.reference import encode_split

    pairs = _pairs(matrices, device)
    masters = [random_tensor(*shape, device=device, scale=0.02, dtype=torch.float32) for shape in matrices]
    halves = [encode_split(master) for master in masters]
    updates = [random_tensor(left.d, right.d, device=device, scale=1e-3, dtype=torch.float32) for left, right in pairs]
    inputs: dict[str, Tensor] = {}
    for number, (high, low) in enumerate(halves):
        inputs |= {f"weight {number}": high.view(DTYPE), f"low {number}": low, f"update {number}": updates[number]}
    for number, master in enumerate(masters):
        inputs[f"master {number}"] = master

    def each(function: Callable[..., None]) -> System:
        def call(*given: Tensor) -> tuple[Tensor, ...]:
            for number in range(len(pairs)):
                function(number, *given[3 * number : 3 * number + 3], given[3 * len(pairs) + number])
            return given[0 : 3 * len(pairs) : 3]

        return call

    def ours() -> System:
        from ds_slide.kernels.lsp.apply import apply_

        return each(lambda number, w, low, update, _: apply_(w, low, update, *pairs[number], DECAY, SCALE, (0, 0)))

    def dense() -> System:
        """Of an fp32 master, by matrix products in bf16."""
        matrices = [[one.dense(DTYPE) for one in pair] for pair in pairs]

        def call(number: int, weight: Tensor, _: Tensor, update: Tensor, master: Tensor) -> None:
            left, right = matrices[number]
            weight.copy_(master.mul_(DECAY).add_(left @ update.to(DTYPE) @ right.T, alpha=SCALE))

        return each(call)

    def reference() -> Results:
        results = {}
        for number, (left, right) in enumerate(pairs):
            moved = left.dense(torch.float64) @ updates[number].double() @ right.dense(torch.float64).T
            results[f"weight {number}"] = DECAY * masters[number].double() + SCALE * moved
        return results

    outputs = tuple(f"weight {number}" for number in range(len(pairs)))
    moved = sum(8 * master.numel() for master in masters) + sum(update.nbytes for update in updates)
    systems: dict[str, Factory] = {"ours": ours, "eager": dense}
    return Problem("lsp_apply", _name(matrices), inputs, outputs, systems, reference, moved, absent=NO_LIGER)


def _codec(matrices: Matrices, device: torch.device) -> Lsp:
    from ds_slide.compression.lsp.codec import Lsp
    from ds_slide.config import CompressionConfig
    from ds_slide.model.layout import ParameterInfo, build_layout

    infos = [ParameterInfo(str(i), shape, shape[0] * shape[1], 0) for i, shape in enumerate(matrices)]
    codec = Lsp(build_layout(infos, 1), DTYPE, CompressionConfig(type="lsp", d=1 << 16, r=NON_ZEROS))
    encoding = torch.empty(codec.encode_bytes, dtype=torch.uint8, device=device)
    codec.begin(device, encoding, torch.empty(codec.apply_bytes // 4, device=device))
    return codec


def encode_unit(matrices: Matrices, device: torch.device) -> Problem:
    """The gradients of a unit, with their square sum. The bound: read G, write S [d, d] in bf16."""
    codec = _codec(matrices, device)
    gradients = [random_tensor(*shape, device=device, scale=1e-3) for shape in matrices]
    encoded = torch.empty(codec.numel, dtype=DTYPE, device=device)

    def by(encode: Callable[..., Tensor]) -> System:
        def call(*given: Tensor) -> tuple[Tensor, ...]:
            encode(given, encoded, accumulate=False)
            return tuple(matrix.within(encoded) for matrix in codec.matrices)

        return call

    def reference() -> Results:
        dense = [(pair.left.dense(torch.float64), pair.right.dense(torch.float64)) for pair in codec.pairs]
        products = (left.T @ g.double() @ right for g, (left, right) in zip(gradients, dense, strict=True))
        return dict(zip(outputs, products, strict=True))

    outputs = tuple(f"compressed {number}" for number in range(len(matrices)))
    systems: dict[str, Factory] = {
        "ours": lambda: by(codec.encode_in_groups),
        "one by one": lambda: by(codec.encode_one_by_one),
    }
    inputs = {f"gradient {number}": gradient for number, gradient in enumerate(gradients)}
    moved = sum(gradient.nbytes for gradient in gradients) + codec.nbytes
    return Problem("lsp_encode_unit", _name(matrices), inputs, outputs, systems, reference, moved, absent=NO_LIGER)


def apply_unit(matrices: Matrices, device: torch.device) -> Problem:
    """The update of a unit's split masters. The bound: read and write both halves, read D [d, d] in fp32."""
    return _apply_unit("lsp_apply_unit", matrices, device)


def apply_unit_rounded(matrices: Matrices, device: torch.device) -> Problem:
    """The update of a unit's bf16 weights without anything that completes them, rounded stochastically. The bound: read
    and write the weights, read D [d, d] in fp32."""
    return _apply_unit("lsp_apply_rounded", matrices, device, rounded=True)


def _apply_unit(kernel: str, matrices: Matrices, device: torch.device, *, rounded: bool = False) -> Problem:
    from ds_slide.compression.codec import Masters
    from ds_slide.optim.reference import encode_split

    codec = _codec(matrices, device)
    master = random_tensor(codec.layout.slot_numel, device=device, scale=0.02, dtype=torch.float32)
    high, low = encode_split(master)
    change = random_tensor(codec.numel, device=device, scale=1e-3, dtype=torch.float32)
    weight, key = high.view(DTYPE), STEP_KEY if rounded else None
    inputs = {"weight": weight, "change": change} if rounded else {"weight": weight, "low": low, "change": change}
    before = weight.double() if rounded else master.double()

    def by(update: Callable[..., None]) -> System:
        def call(weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            *low, change = others
            update(change, Masters(weight, *low), [DECAY] * len(matrices), key)
            return tuple(matrix.of_weights(weight) for matrix in codec.matrices)

        return call

    def reference() -> Results:
        results = {}
        for name, matrix, pair in zip(outputs, codec.matrices, codec.pairs, strict=True):
            left, right = pair.left.dense(torch.float64), pair.right.dense(torch.float64)
            moved = left @ matrix.within(change).double() @ right.T
            results[name] = DECAY * matrix.of_weights(before) + moved
        return results

    outputs = tuple(f"weight {number}" for number in range(len(matrices)))
    systems: dict[str, Factory] = {
        "ours": lambda: by(codec.apply_in_groups),
        "one by one": lambda: by(codec.apply_one_by_one),
    }
    moved = (4 if rounded else 8) * master.numel() + change.nbytes
    return Problem(kernel, _name(matrices), inputs, outputs, systems, reference, moved, absent=NO_LIGER)


def makers(device: torch.device, tiny: bool) -> Iterator[tuple[str, Makers]]:
    """By kernel, one function a shape that sets the problem up."""
    for kernel, make, cases in (
        ("lsp_compress", compress, TINY if tiny else CASES),
        ("lsp_apply", apply, TINY if tiny else CASES),
        ("lsp_encode_unit", encode_unit, TINY_UNITS if tiny else BLOCKS),
        ("lsp_apply_unit", apply_unit, TINY_UNITS if tiny else BLOCKS),
        ("lsp_apply_rounded", apply_unit_rounded, TINY_UNITS if tiny else BLOCKS),
    ):
        yield kernel, [lambda case=case, make=make: make(case, device) for case in cases]  # type: ignore[misc]
