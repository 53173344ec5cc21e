"""Trained heads: module, checkpoint format and drafter of each, side by side."""
