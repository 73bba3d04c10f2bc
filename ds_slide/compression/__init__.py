"""Gradient codecs: what leaves the GPU for a gradient, and how its update reaches the weights."""
