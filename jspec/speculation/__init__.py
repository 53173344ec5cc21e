"""Speculative decoding: rounds and acceptance rules over models that are functions passed in.

Nothing here knows Flax, weights or text. `round` is one round; `plain` reads the prompt, decodes
without drafts, which speculation must equal, and runs many rounds on the device.
"""
