"""Speculative execution of a model of small images: a small network guesses pixels of a large one.

    pip install scikit-learn
    python -m jspec.experiment --config=configs/functions_digits.py --workdir=runs/digits
    python -m jspec.report runs/digits

Both networks are trained first, on 1,500 of scikit-learn's digits, 8 x 8 pixels of 17 levels: a
minute or two on two cores. `jspec.lab.functions` has them. See docs/speculate.md.

Values per call of the large network with 1, 2, 4 and 8 guesses a round (2026-11-27, a count): small
network 1.78, 2.35, 3.17, 3.97; coupled 1.76, 2.36, 3.16, 4.02; table 1.69, 2.17, 2.74, 3.28.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import chain, defaults, ordered


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.kind = "functions"
    config.title = "Digits, pixel after pixel"
    config.functions = ordered(
        {
            "small network": chain("digits", "small"),
            "small network, coupled": chain("digits", "small", acceptance="coupled"),
            "table of levels": chain("digits", "table"),
        }
    )
    return config
