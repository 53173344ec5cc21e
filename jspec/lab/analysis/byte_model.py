"""Whether a draft model pays for a target, computed from their configs and a machine's two rates.

A call over w tokens a row reads every weight once, whatever w is, and the cache of every row; it
computes with every weight for every token. It takes at least

    seconds = max(bytes / bandwidth, operations / rate)

(the roofline model, doi 10.1145/1498765.1498785). At small w the bytes decide: verifying is nearly
free, and a draft costs its share of the target's bytes, the paper's c (Leviathan et al., arXiv
2211.17192, Def. 3.7). Where w times the batch is large the operations decide, and speculation stops
paying. Launches, norms, sampling and the like come on top of both sides and are left out.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jspec.common.errors import InputError
from jspec.lab.analysis.call_cost import CallCost, Machine, measure_machine
from jspec.lab.analysis.theory import break_even_alpha, walltime_improvement
from jspec.models.config import PRESETS, DecoderConfig
from jspec.weights.hf import read_config
from jspec.weights.published import SMOLLM2

_FIRST_CALL_WIDTH = 2  # a draft model's first call of a round; see `drafters.model`
_FLOAT_BYTES = {"bfloat16": 2, "float32": 4}
_SAME_SHAPE = {SMOLLM2: "smollm2-135m"}


@dataclasses.dataclass(frozen=True)
class PairCost:
    """Least costs of rounds of a draft model and a target, in plain decoding steps.

    `context` are the tokens in each row's caches.
    """

    target: CallCost
    draft: CallCost
    machine: Machine
    context: int = 0
    batch_size: int = 1

    def seconds(self, model: CallCost, width: int) -> float:
        """Returns the least seconds of a call of a model over `width` tokens a row."""
        sizes = {"context": self.context, "batch_size": self.batch_size}
        reading = model.call_bytes(width, **sizes) / self.machine.bandwidth
        return max(reading, model.call_operations(width, **sizes) / self.machine.flop_rate)

    @property
    def plain_seconds(self) -> float:
        """Of a plain decoding step."""
        return self.seconds(self.target, 1)

    @property
    def cost_ratio(self) -> float:
        """The paper's c: a decoding step of the draft."""
        return self.seconds(self.draft, 1) / self.plain_seconds

    def drafting_cost(self, number: int) -> float:
        """Returns what drafting this many tokens costs: a call for each token."""
        if number == 0:
            return 0.0
        first = self.seconds(self.draft, _FIRST_CALL_WIDTH)
        return (first + (number - 1) * self.seconds(self.draft, 1)) / self.plain_seconds

    def verify_cost(self, number: int) -> float:
        """Returns what verifying this many drafts costs."""
        return self.seconds(self.target, number + 1) / self.plain_seconds

    def costs(self, number: int) -> tuple[float, float]:
        """Returns what each of this many drafts costs, and what verifying them costs."""
        return self.drafting_cost(number) / max(number, 1), self.verify_cost(number)

    def improvement(self, alpha: float, number: int) -> float:
        """Returns the speed over plain decoding's (Thm 3.8 with these costs)."""
        return walltime_improvement(alpha, number, *self.costs(number))


def predict_table(predict: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns what to expect of a pair, one row for each number of drafts.

    Args:
      predict: the fields of `experiments.spec.PairSpec`, already checked: `bandwidth` in bytes and
        `flop_rate` in operations a second, None to measure them here.

    Raises:
      InputError: no such model, or models that do not fit.
    """
    dtype, alphas = predict["dtype"], predict["alphas"]
    given = [predict["bandwidth"], predict["flop_rate"]]
    measured = measure_machine(dtype) if None in given else given
    rates = [own if rate is None else rate for rate, own in zip(given, measured, strict=True)]
    target, draft = (_make_cost(predict, side, dtype) for side in ("target", "draft"))
    if size := predict["draft_vocab_size"]:
        draft = dataclasses.replace(draft, config=_with_head(draft.config, size))
    if target.config.vocab_size != draft.config.vocab_size:
        raise InputError(
            f"expected draft and target of one vocabulary, got {draft.config.vocab_size} and "
            f"{target.config.vocab_size} ids"
        )
    pair = PairCost(target, draft, Machine(*rates), predict["context"], predict["batch_size"])
    rows = []
    for number in predict["numbers"]:
        costs = pair.drafting_cost(number), pair.verify_cost(number)
        speeds = [pair.improvement(alpha, number) for alpha in alphas]
        rows.append([number, *costs, break_even_alpha(number, *pair.costs(number)), *speeds])
    names = [f"speed at alpha {alpha:g}" for alpha in alphas]
    return {
        "columns": ["drafts a round", "drafting", "verifying", "break-even alpha", *names],
        "units": ["tokens", "plain steps", "plain steps", "",
                  *["times plain decoding's"] * len(alphas)],
        "rows": rows,
        "notes": _describe(pair, predict),
    }  # fmt: skip


def load_config(name: str) -> DecoderConfig:
    """Returns the config of a preset or a Hugging Face folder; an `InputError` if it is neither."""
    preset = _SAME_SHAPE.get(name, name.removeprefix("random:"))
    if preset in PRESETS:
        return PRESETS[preset]
    folder = pathlib.Path(name)
    if not folder.is_dir():
        raise InputError(f"expected a preset among {', '.join(PRESETS)} or a folder, got {name!r}")
    return read_config(folder)


def _make_cost(predict: Mapping[str, Any], side: str, dtype: str) -> CallCost:
    kind = predict[f"{side}_quantization"]
    return CallCost(
        load_config(predict[side]),
        bytes_per_weight=predict[f"{side}_bytes_per_weight"],
        quantization=None if kind == "none" else kind,
        float_bytes=_FLOAT_BYTES[dtype],
    )


def _with_head(config: DecoderConfig, size: int) -> DecoderConfig:
    """Returns the config of a draft model with a head of its own; see `draft_vocab_size`."""
    if size > config.vocab_size:
        most = config.vocab_size
        raise InputError(f"expected draft_vocab_size of at most {most}, got {size}")
    return dataclasses.replace(config, tie_embeddings=False, head_size=size)


def _describe(pair: PairCost, predict: Mapping[str, Any]) -> list[str]:
    names = "bandwidth", "flop_rate"
    origins = ["measured here" if predict[name] is None else "given" for name in names]
    return [
        f"{side} {predict[side]}: {model.weight_bytes / 1e9:.3g} GB of weights a call, "
        f"{model.slot_bytes / 1e3:.3g} kB of cache a token; "
        f"{pair.seconds(model, 1) * 1e3:.3g} ms a decoding step at least"
        for side, model in (("target", pair.target), ("draft", pair.draft))
    ] + [
        f"machine: {pair.machine.bandwidth / 1e9:.4g} GB/s ({origins[0]}), "
        f"{pair.machine.flop_rate / 1e9:.4g} GFLOP/s ({origins[1]}); context of "
        f"{pair.context} tokens, batch of {pair.batch_size}",
        f"cost ratio c = {pair.cost_ratio:.3f}; plain decoding: at most "
        f"{pair.batch_size / pair.plain_seconds:.4g} tokens/s",
    ]
