"""What offloading adds: updates, gradients and norms on the GPU."""
