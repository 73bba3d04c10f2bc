"""Triton kernels put into the modules of a Hugging Face model, where a probe shows that they compute the same."""
