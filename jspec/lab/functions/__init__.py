"""Chains that are not text, for `jspec.speculate`, and what guesses save in them."""
