"""Who owns which KV page.

Pure host code (numpy and stdlib): it knows token counts and page ids, no request, no jax.
"""
