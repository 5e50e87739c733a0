"""The model, in Flax NNX: the only home of flax.

At its border stand a plain nested dict of arrays and `KVPages`.
"""
