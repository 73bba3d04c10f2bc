"""Products with sparse projectors: compressing a gradient, applying the update that comes back, what is lost by it."""
