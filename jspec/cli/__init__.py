"""Flags and command lines of the programs."""
