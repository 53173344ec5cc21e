"""What a GPU or a TPU would run, read from the programs that XLA compiles for it without one."""
