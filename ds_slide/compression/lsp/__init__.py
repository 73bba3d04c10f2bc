"""LSP-Offload (arXiv 2406.10181): gradients leave the GPU as PᵀGQ, and updates D of that size come back as PDQᵀ, with
sparse projectors P and Q whose values are learned."""
