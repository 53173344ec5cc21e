"""What `python -m jspec.benchmark` measures: one module a mode, all with one timer and record."""
