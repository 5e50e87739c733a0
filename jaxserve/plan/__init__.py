"""Planning from arithmetic alone: how many pages fit. Pure host code."""
