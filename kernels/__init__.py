"""Triton kernels, one operation in each file. Each runs under TRITON_INTERPRET=1 on the CPU and has a torch
reference."""
