"""A server: requests that come at any time are answered together, and HTTP around that."""
