"""The page at /: what the engine does at this moment, and a box to try the model."""
