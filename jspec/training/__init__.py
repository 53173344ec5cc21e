"""Training drafters from the target alone.

`texts` become rows and batches in `packing`; `config` configures a run, `loop` is the training,
and `run` all of it from a config to a folder with a drafter. `eagle`, `dflash`, `heads`,
`lookahead` and `draft_model` are what can be trained.
"""
