"""Each kernel in plain torch: what it must compute, at any precision. Tests compare with these in fp64."""
