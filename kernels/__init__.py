"""Triton kernels, one operation a file. Each runs under TRITON_INTERPRET=1 on the CPU and has a torch reference."""
