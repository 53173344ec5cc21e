"""Speculative decoding over functions: rounds, rules, noise. Knows no Flax and no weights."""
