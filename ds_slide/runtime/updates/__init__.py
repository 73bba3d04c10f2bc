"""The updates of a unit's states: their time and place."""
