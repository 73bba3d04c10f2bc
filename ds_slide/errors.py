"""Errors that DS-Slide raises itself.

Every message is one sentence: what is wrong, where (JSON path, file, tier, bytes), and what to do about it.
"""


class SlideError(RuntimeError):
    """Something DS-Slide cannot do, refused before it could change a result."""


class SlideAttributeError(SlideError, AttributeError):
    """An attribute that DeepSpeed's own object would have. An AttributeError, so that `hasattr` is false."""

    def __init__(self, message: str, *, name: str, obj: object) -> None:
        AttributeError.__init__(self, message, name=name, obj=obj)


class SlideConfigError(SlideError, ValueError):
    """A value in the DeepSpeed config, or an argument of the same kind, that DS-Slide cannot use."""
