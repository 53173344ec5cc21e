"""Requests in, text out: the Python API and what it is made of."""
