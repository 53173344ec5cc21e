"""Theory and statistics of measurements."""
