"""Speculative decoding: rounds and acceptance rules over models that are functions passed in.

Nothing here knows Flax, weights or text. `step` is one round; `loop` runs many on the device;
`plain` is the decoding that speculation must equal; `prefill` reads the prompt.
"""
