"""Function calls: what a request may say about tools, and how calls are read out of a model's text."""
