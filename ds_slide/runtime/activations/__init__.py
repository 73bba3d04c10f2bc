"""Activations of blocks: kept, recomputed, or moved to host memory and SSD."""
