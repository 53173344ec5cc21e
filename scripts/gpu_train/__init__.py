"""The program that trains a head on a GPU in a quarter of an hour: see `__main__`."""
