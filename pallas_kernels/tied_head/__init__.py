"""The tied head's product: hidden rows times every row of the embedding, where the embedding lies."""
