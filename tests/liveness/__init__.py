"""Explores the interleavings of the engine's hand-over protocol."""
