"""Formats, manifest and crash-safe publishing of checkpoints. It knows states, and nothing of DeepSpeed's engine."""
