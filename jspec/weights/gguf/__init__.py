"""GGUF, llama.cpp's format: the container, the config and the tokenizer in it."""
