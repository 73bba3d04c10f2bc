"""An allocator that refuses memory, as a mode of torch's dispatcher that lies below the engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Refusing(TorchDispatchMode):
    """An allocator that refuses memory to operators of these numbers, as often as it says, while something is kept and
    operators run again.

    `late`: it refuses what they take last, when they have drawn their random numbers."""

    def __init__(self, spare: Any, refused: dict[int, int], *, late: bool = False) -> None:
        super().__init__()
        self.spare, self.refused, self.late = spare, dict(refused), late
        self.seen = self.count = 0
        self.refuses_all = False
        self._watches = 0
        """How often the engine's mode lies above this one."""
        if spare is not None:
            self._count_watches(spare.shortage.retrying)

    def _count_watches(self, retrying: Any) -> None:
        enter, leave = retrying.__enter__, retrying.__exit__

        def entered() -> Any:
            self._watches += 1
            return enter()

        def left(*given: Any) -> None:
            self._watches -= 1
            leave(*given)

        retrying.__enter__, retrying.__exit__ = entered, left

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuses = self.refuses_all
        if self._watches and keeps_something(self.spare):
            refuses = self.refused.get(self.seen, 0) > 0
            self.seen += not refuses
        if refuses:
            self.refused[self.seen] = self.refused.get(self.seen, 0) - 1
            self.count += 1
            if self.late and not function._schema.is_mutable:
                function(*args, **(kwargs or {}))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function(*args, **(kwargs or {}))


def keeps_something(spare: Any) -> bool:
    calls = [ref() for ref in spare.activations.kept_calls._calls]
    return any(call is not None and call.nbytes and not call.is_in_use for call in calls)
