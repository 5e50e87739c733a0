"""From logits to tokens: pure jnp functions that the device layer puts into its programs."""
