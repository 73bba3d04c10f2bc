"""Directories and files of a run, below directories that others may write to."""
