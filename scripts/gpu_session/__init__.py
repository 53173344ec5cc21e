"""The program that checks and measures jspec on a machine with a GPU: see `__main__`."""

import time

BEGIN = time.monotonic()  # before JAX is imported, which takes seconds of the session's time
