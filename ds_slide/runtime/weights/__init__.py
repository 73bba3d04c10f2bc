"""The sources of a unit's weights when the model uses it."""
