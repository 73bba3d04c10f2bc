"""Errors that DS-Slide raises itself.

Every message is one sentence: what is wrong, where (JSON path, file, tier, bytes), and what to do about it.
"""


class SlideError(RuntimeError):
    """Something DS-Slide cannot do, refused before it could change a result."""


class SlideConfigError(SlideError, ValueError):
    """A value in the DeepSpeed config, or an argument of the same kind, that DS-Slide cannot use."""


class SlideAttributeError(SlideError, AttributeError):
    """An attribute of a stock object that DS-Slide's has not; `hasattr` and `getattr` with a default work as ever."""
