"""Table 1 and the curves of Figures 2, 3 and 4 of Leviathan et al. (arXiv 2211.17192).

    python -m jspec.experiment --config=configs/paper_table1.py --workdir=runs/paper_table1
    python -m jspec.report runs/paper_table1

Formulas alone: no model is loaded. The paper prints, for free drafts (c = ĉ = 0):

    alpha  drafts  operations  speed
    0.6     2        1.53       1.96
    0.7     3        1.58       2.53
    0.8     2        1.23       2.44
    0.8     5        1.63       3.69
    0.9     2        1.11       2.71
    0.9    10        1.60       6.86
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.kind = "theory"
    config.title = "Table 1 and Figures 2 to 4 of arXiv 2211.17192"
    return config
