"""Kernels for offloading: updates, gradients and norms on the GPU."""
