"""The highest rates of a machine, by measurement. The plan's times are made from them."""
