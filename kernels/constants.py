"""Constants of the kernels that a plan needs to count bytes. The plan does not import Triton."""

ALIGNMENT = 64
"""Elements. Offsets in buffers are multiples of it (`ds_slide.model.layout.ALIGNMENT`), which keeps vector loads
whole."""
SEGMENT = 16384
"""Elements of one program of a square sum, which writes one number. Longer segments leave few programs (LOG.md)."""
