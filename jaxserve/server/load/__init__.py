"""The client side: puts a server under load and measures what comes back.

Used by `jaxserve bench serve`, `jaxserve bench capacity` and `scripts/server_gates`. Needs the standard
library and numpy alone, and knows nothing of this project's server but what it speaks.
"""
