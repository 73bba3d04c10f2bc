"""Activations of blocks: kept or recomputed, and GPU memory that is left over claimed for them and for states."""
