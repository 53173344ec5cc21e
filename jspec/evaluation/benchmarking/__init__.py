"""jspec and transformers side by side: what `python -m jspec.benchmark` is made of."""
