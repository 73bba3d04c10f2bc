"""Directories and files of a run, below directories that other users may write to."""
