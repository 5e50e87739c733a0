"""The seeds of draws, all derived from the few that users give. Used by the engine and by `jaxserve run`.

Invariant: two outputs share a seed only where a user gave them the same one.
"""

import hashlib


def derive_seed(seed: int, index: int) -> int:
    """A 64-bit seed for request number `index` of an engine (or file) seeded with `seed`; the
    same everywhere.
    """
    return _hashed(f"{seed}:{index}")


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with this seed. Choice 0 has the request's own; the
    others have none that `derive_seed` gives to another request.
    """
    return _hashed(f"{seed}:choice:{index}") if index else seed


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
