"""Where the weights of a unit come from when the model uses it."""
