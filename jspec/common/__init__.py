"""What every package may use; nothing here knows what speculative decoding is."""
