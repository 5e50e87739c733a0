"""Kernels in C++ for the CPU, called by XLA through jax.ffi: their shared headers, how they are compiled
(`build`) and how they are found and registered (`load`).
"""
