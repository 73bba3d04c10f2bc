"""Numbers of the kernels that a plan counts bytes by, which does without Triton."""

ALIGNMENT = 64
"""Elements: offsets in buffers that are multiples of it (`ds_slide.model.layout.ALIGNMENT`) keep vector loads whole."""
SEGMENT = 16384
"""Elements of one program of a square sum, which leaves one number; longer ones leave few programs (LOG.md)."""
