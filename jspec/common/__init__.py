"""What every room may use; nothing here knows what speculative decoding is."""
