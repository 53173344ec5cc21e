"""GGUF, llama.cpp's format."""
