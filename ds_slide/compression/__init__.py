"""What of a gradient leaves the GPU, and how the update that it leads to reaches the weights."""
