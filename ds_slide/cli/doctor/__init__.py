"""`ds-slide doctor`: what this machine can do, what is missing, and what to do about it."""
