"""Training drafters from the target alone.

`texts` become rows and batches in `packing`; `config` is what a run is told, `trainee` what the
training loop knows of a drafter, `loop` the training, and `run` all of it from a config to a folder
with a drafter. `eagle`, `medusa`, `blockwise`, `lookahead` and `draft_model` are the trainees.
"""
