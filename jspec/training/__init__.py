"""Training drafters from the target alone."""
