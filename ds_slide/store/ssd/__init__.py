"""The SSD tier: state files, what lies where in them, and the checks of what is read."""
