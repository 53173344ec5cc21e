"""From logits to the distribution that tokens are sampled from."""
