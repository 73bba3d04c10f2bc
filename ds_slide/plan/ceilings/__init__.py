"""What a machine can do at most, by measurement: the plan's times are made from it."""
