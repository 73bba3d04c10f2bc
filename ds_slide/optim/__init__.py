"""Update rules: hyper-parameters, the C++ path for CPU tensors, and the torch reference that defines the bits."""

from ds_slide.optim.hyper import AdamWConstants, AdamWHyper

__all__ = ["AdamWConstants", "AdamWHyper"]
