"""How often a small model's drafts are kept where its target says whatever it likes.

`python scripts/unconditional.py --workdir=runs/unconditional`

In kind of the first rows of Table 3 of Leviathan et al., arXiv 2211.17192, section 4.2: there a
decoder of 97M parameters, trained on lm1b, is drafted for by one of 6M (alpha 0.88 at temperature
0, 0.89 at 1), by bigrams (0.05) and by unigrams (0.03), on unconditional text. Here two Llamas are
trained from scratch, by cross-entropy on the docstrings of Python's standard library, which every
machine has, in BPE tokens learnt from them; the tables are counted on the same texts. Other models,
texts and tokens: compare orders, not digits.

At temperature 1 every answer goes on from BOS alone, with a seed of its own. At temperature 0 there
is but one such text: each answer is given another first token, the most frequent of the corpus. An
answer ends where the model ends it. See `jspec.evaluation.experiments.kept_drafts` for what is
measured.

The steps lie in the workdir; the same command goes on with the first that is missing:

    corpus.jsonl  vocabulary/  target/  draft/  table.safetensors  unconditional.json

`target/` and `draft/` are runs of `jspec.train`, which can be looked at; see
`jspec.training.from_scratch` for what their logs are good for.

Measured with Python 3.11.7 (2.1M and 0.17M parameters; 25 minutes on one core of an AMD EPYC that
others used as well; benchmarks/results/2026-11-22-cpu-unconditional.json): alpha of the draft 0.61
at temperature 0 and 0.63 at 1, of bigrams 0.36 and 0.49, of unigrams 0.07 and 0.24, of uniform
drafts 0.00 and 0.17. The distribution of a small target at temperature 1 is flat: any draft is kept
often.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.evaluation.experiments.unconditional import Plan, make_lines, run

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all that is made.", required=True)
_DEFINE: Mapping[Any, Any] = {int: flags.DEFINE_integer, float: flags.DEFINE_float}
_SIZES = [
    _DEFINE[field.type](field.name, field.default, field.metadata["help"])
    for field in dataclasses.fields(Plan)
]


def main() -> None:
    """Reads the flags, runs and prints."""
    report = run(Plan(**{flag.name: flag.value for flag in _SIZES}), pathlib.Path(_WORKDIR.value))
    print("\n".join(make_lines(report)))


if __name__ == "__main__":
    cli.run_main(main)
