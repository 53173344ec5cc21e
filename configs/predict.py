"""Will this pair pay on this machine? From bytes and operations alone; no weights are needed.

    python -m jspec.experiment --config=configs/predict.py --workdir=runs/predict
    python -m jspec.experiment --config=configs/predict.py:TARGET,DRAFT --workdir=runs/predict_mine
    python -m jspec.report runs/predict

TARGET and DRAFT are presets (llama3.2-1b, llama3.2-3b, llama3.1-8b, llama3.1-70b, smollm2-135m) or
Hugging Face folders, of which only config.json is read. How fast this machine reads weights and
multiplies is measured, in a second or two; that of another one is given, in bytes and operations a
second: `--config.predict.mine.bandwidth=4.8e12 --config.predict.mine.flop_rate=9.9e14`.

On two cores of an AMD EPYC (2026-11-23; 25.7 GB/s): Llama-3.2-1B for 3B at best 1.24 times plain
decoding's speed at alpha 0.7, in int8 1.60, in int4 1.85; these are limits, see the report.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, ordered, pair, split_pair


def get_config(mine: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      mine: "TARGET,DRAFT" asks about that pair, under the label "mine".
    """
    config = defaults()
    config.kind = "predict"
    config.title = "Which pairs would pay on this machine"
    if mine:
        config.predict = ordered({"mine": pair(*split_pair(mine))})
        return config
    config.predict = ordered(
        {
            "llama_1b_for_3b": pair("llama3.2-3b", "llama3.2-1b"),
            "llama_1b_int8_for_3b": pair("llama3.2-3b", "llama3.2-1b", draft_quantization="int8"),
            "llama_1b_int4_for_3b": pair("llama3.2-3b", "llama3.2-1b", draft_quantization="int4"),
            "llama_1b_for_8b": pair("llama3.1-8b", "llama3.2-1b"),
            "llama_1b_int4_for_8b": pair("llama3.1-8b", "llama3.2-1b", draft_quantization="int4"),
            "llama_8b_for_70b": pair("llama3.1-70b", "llama3.1-8b"),
        }
    )
    return config
