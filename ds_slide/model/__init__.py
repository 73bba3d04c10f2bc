"""The structure of the model: blocks, outer modules, and the flat layout of each."""
