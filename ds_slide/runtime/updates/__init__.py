"""When and where the states of a unit are updated."""
