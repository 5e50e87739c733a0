"""The one hand on the device: compiles, puts, gets and blocks. Nothing outside this package does."""
