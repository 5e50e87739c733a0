"""Checkpoints: named, fetched, opened, checked and read into host memory. Start at `loader.py`."""
