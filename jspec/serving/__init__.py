"""A server that answers concurrent requests together, over HTTP."""
