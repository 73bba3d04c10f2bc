"""What the ranks of a run do together, and what they know of each other."""
