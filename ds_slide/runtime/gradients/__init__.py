"""The way of a unit's gradients from backward to its update."""
