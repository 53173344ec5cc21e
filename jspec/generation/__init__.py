"""Requests in, text out: the Python API, the compiled programs and what their rounds cost."""
