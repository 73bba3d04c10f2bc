"""Where the gradients of a unit go when backward has made them."""
