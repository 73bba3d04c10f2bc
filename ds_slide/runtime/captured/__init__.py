"""Blocks whose forward and backward the GPU repeats from a recording (CUDA graphs), so that the host launches one graph
in place of hundreds of operators."""
