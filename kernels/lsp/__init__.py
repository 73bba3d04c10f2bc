"""Products with sparse projectors: they compress a gradient, apply the update that comes back, and measure the loss."""
