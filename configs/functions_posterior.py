"""Speculative execution of chains on a posterior whose likelihood reads 20,000 outcomes.

    python -m jspec.experiment --config=configs/functions_posterior.py --workdir=runs/posterior
    python -m jspec.report runs/posterior

A Metropolis chain, whose decisions are guessed, and unadjusted Langevin steps, whose Gaussians are;
each by Laplace's approximation, and by a guess that knows nothing. See docs/speculate.md.

Values per call of the posterior with 1, 2, 4 and 8 guesses a round (2026-11-27, a count):
Metropolis, Laplace 1.99, 2.97, 4.89, 8.66; coin 1.73, 2.26, 2.91, 3.29; Langevin, Laplace 1.99,
2.96, 4.84, 8.50; no gradient 1.72, 2.25, 2.92, 3.46.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import chain, defaults, ordered

_SIZE = {"num_steps": 512, "num_chains": 8}


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.kind = "functions"
    config.title = "Chains on a posterior"
    config.functions = ordered(
        {
            "Metropolis, Laplace": chain("metropolis", "quadratic", **_SIZE),
            "Metropolis, coupled": chain("metropolis", "quadratic", acceptance="coupled", **_SIZE),
            "Metropolis, coin": chain("metropolis", "coin", **_SIZE),
            "Langevin, Laplace": chain("langevin", "quadratic", **_SIZE),
            "Langevin, no gradient": chain("langevin", "nothing", **_SIZE),
        }
    )
    return config
