"""The SSD tier: state files, their layout, and the checks of reads."""
