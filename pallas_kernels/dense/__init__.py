"""Products of a few rows and weight matrices, at the speed at which the weights can be read."""
