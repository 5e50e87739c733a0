"""What may come next: masks over the vocabulary, made on the host while the device computes."""
