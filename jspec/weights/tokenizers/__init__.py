"""Tokenizers: text to ids and back, chat templates, and text from a stream of tokens."""
