"""Programs compiled by XLA for a GPU or a TPU, without the device."""
