"""Errors that DS-Slide raises itself.

Every message is one sentence: what is wrong, where (JSON path, file, tier, bytes), and what to do about it.
"""

from typing import Literal


class SlideError(RuntimeError):
    """Something DS-Slide cannot do, refused before it could change a result."""


class SlideConfigError(SlideError, ValueError):
    """A value in the DeepSpeed config, or an argument of the same kind, that DS-Slide cannot use."""


class SlideAttributeError(SlideError, AttributeError):
    """An attribute of a stock object that DS-Slide's has not; `hasattr` and `getattr` with a default work as ever."""


class DoesNotFit(SlideError):
    """A plan for which a tier is too small. `needed`, `available`: bytes of it."""

    def __init__(self, tier: Literal["gpu", "host", "ssd"], needed: int, available: int, sentence: str) -> None:
        super().__init__(sentence)
        self.tier, self.needed, self.available = tier, needed, available
