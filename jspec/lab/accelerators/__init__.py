"""Programs compiled by XLA for a GPU or a TPU that is not here."""
