"""The language model head and its cross-entropy."""
