"""Chains that are no text, for `jspec.speculate`: what they are, and what guesses save."""
