"""How often a small model's drafts are kept on unconditional text, with two Llamas from scratch.

`python -m jspec.evaluation.experiments.unconditional --workdir=runs/unconditional`

As in the first rows of Table 3 of Leviathan et al., arXiv 2211.17192, section 4.2, where a decoder
of 97M parameters is drafted for by one of 6M (alpha 0.88 at temperature 0, 0.89 at 1), by bigrams
(0.05) and by unigrams (0.03). Here the models are trained on the docstrings of Python's standard
library, which every machine has; other models and texts: compare orders, not digits. At
temperature 1 every answer goes on from BOS alone, at temperature 0 from another first token each.

The steps lie in the workdir, and the same command goes on with the first that is missing:

    corpus.jsonl  vocabulary/  target/  draft/  table.safetensors  unconditional.json

`jspec.evaluation.experiments.kept_drafts` says what is measured.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.work_dir import check_or_write_config, make_workdir, write_json
from jspec.drafters import DrafterOptions
from jspec.drafters.ngram_table import count_ngrams, save_table
from jspec.evaluation.experiments.kept_drafts import measure_kept_drafts
from jspec.generation import provenance
from jspec.generation.request import Request, Settings
from jspec.training.config import Recipe
from jspec.training.from_scratch import HEAD_DIM, train_from_scratch, write_stand_in
from jspec.training.metrics import read_metrics
from jspec.training.texts import read_docstrings, read_token_texts
from jspec.weights import NUM_BYTES, TokenizerLike, learn_bpe
from jspec.weights.resolver import LoadedModel, load_model

DRAFTERS = ("model", "bigram", "unigram", "random")
_BOS, _EOS = "<|begin|>", "<|end|>"
_CORPUS = "corpus.jsonl"


def _size(default: Any, what: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": what})


@dataclasses.dataclass(frozen=True)
class Plan:
    """How large everything is: each field is a flag."""

    corpus_bytes: int = _size(1_500_000, "Of docstrings.")
    vocab_size: int = _size(1024, "Tokens, all bytes and the two ends among them.")
    target_layers: int = _size(4, "Of the target.")
    target_width: int = _size(192, f"Of the target's residual stream, a multiple of {HEAD_DIM}.")
    draft_layers: int = _size(2, "Of the draft.")
    draft_width: int = _size(64, "Of the draft's residual stream.")
    seq_len: int = _size(256, "Tokens of a row in training, and the models' context.")
    batch_size: int = _size(8, "Rows of a batch in training.")
    num_steps: int = _size(1000, "Updates of each model.")
    learning_rate: float = _size(2e-3, "Of both models.")
    num_answers: int = _size(160, "At each temperature.")
    max_new_tokens: int = _size(128, "Of an answer.")
    num_draft_tokens: int = _size(4, "A round.")

    def __post_init__(self) -> None:
        check_range("vocab_size", self.vocab_size, NUM_BYTES + 2, 65536)
        check_range("max_new_tokens", self.max_new_tokens, 2, self.seq_len - 2)
        check_range("num_answers", self.num_answers, 1, 10**6)
        check_range("num_draft_tokens", self.num_draft_tokens, 1, 64)
        for name in ("target_width", "draft_width"):
            width = getattr(self, name)
            if width < HEAD_DIM or width % HEAD_DIM:
                raise InputError(f"expected {name} to be a multiple of {HEAD_DIM}, got {width}")


def run(plan: Plan, workdir: pathlib.Path) -> dict[str, Any]:
    """Takes the steps that are missing in a workdir; returns what unconditional.json holds.

    Raises:
      InputError: the workdir belongs to another plan, or a step cannot be taken.
    """
    make_workdir(workdir)
    check_or_write_config(workdir / "config.json", dataclasses.asdict(plan))
    output = workdir / "unconditional.json"
    if not output.exists():
        texts = _corpus_texts(workdir / _CORPUS, plan.corpus_bytes)
        models = train_pair(plan, workdir, texts)
        write_json(output, _measure(plan, workdir, texts, *models))
    return json.loads(output.read_bytes())


def _corpus_texts(path: pathlib.Path, num_bytes: int) -> list[str]:
    """Returns the docstrings, which are kept in a file: one a line, its end marked."""
    if not path.exists():
        lines = [json.dumps({"text": text + _EOS}) + "\n" for text in read_docstrings(num_bytes)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"].removesuffix(_EOS) for line in lines]


def train_pair(plan: Plan, workdir: pathlib.Path, texts: Sequence[str]) -> list[LoadedModel]:
    """Trains target and draft unless they are there; returns both."""
    folder = workdir / "vocabulary"
    if not folder.exists():
        tokenizer = learn_bpe(texts, plan.vocab_size, bos=_BOS, eos=_EOS)
        write_stand_in(folder, tokenizer, plan.seq_len)
    recipe = Recipe(num_steps=plan.num_steps, learning_rate=plan.learning_rate, max_norm=1.0)
    models = []
    for name in ("target", "draft"):  # each has the tokens of the folder before it
        folder = train_from_scratch(
            workdir / name, target=str(folder), dtype="float32", texts=(str(workdir / _CORPUS),),
            num_layers=getattr(plan, f"{name}_layers"), width=getattr(plan, f"{name}_width"),
            seq_len=plan.seq_len, batch_size=plan.batch_size, recipe=recipe,
        )  # fmt: skip
        models.append(load_model(str(folder), dtype="float32"))
    return models


def _measure(
    plan: Plan, workdir: pathlib.Path, texts: Sequence[str], target: LoadedModel, draft: LoadedModel
) -> dict[str, Any]:
    """Returns where and on what it was measured, and the acceptance at temperatures 0 and 1."""
    table, size = workdir / "table.safetensors", target.tokenizer.vocab_size
    ids = read_token_texts(str(workdir / _CORPUS), target.tokenizer, with_prompts=True)
    save_table(count_ngrams(ids, size, num_continuations=size), table, target.tokenizer)
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    report: dict[str, Any] = provenance.environment() | {"plan": dataclasses.asdict(plan)}
    report["corpus"] = {"num_texts": len(texts), "sha256": digest}
    for name, model in {"target": target, "draft": draft}.items():
        looks = [one["held_out"] for one in read_metrics(workdir / name) if "held_out" in one]
        num_params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
        report[name] = {"num_params": num_params, "nats_per_token": looks[-1]["losses"][0]}
    report["measured"] = {
        label: measure_kept_drafts(
            make_requests(plan, texts, target.tokenizer, temperature),
            target, draft, DRAFTERS, DrafterOptions(draft_table=str(table)),
            num_draft_tokens=plan.num_draft_tokens, batch_size=16,
        )
        for label, temperature in (("T=0", 0.0), ("T=1", 1.0))
    }  # fmt: skip
    return report


def make_requests(
    plan: Plan, texts: Sequence[str], tokenizer: TokenizerLike, temperature: float
) -> list[Request]:
    """Returns requests of BOS alone; at temperature 0 with another first token each."""
    bos = tokenizer.encode("")
    prompts = [bos] * plan.num_answers
    if temperature == 0:
        firsts = collections.Counter(tokenizer.encode(text, add_bos=False)[0] for text in texts)
        prompts = [[*bos, token] for token, _ in firsts.most_common(plan.num_answers)]
    settings = Settings(plan.max_new_tokens, temperature)
    return [Request(one, dataclasses.replace(settings, seed=i)) for i, one in enumerate(prompts)]


def make_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report as a table."""
    for name in ("target", "draft"):
        one = report[name]
        yield f"{name}: {one['num_params']:,} parameters, {one['nats_per_token']:.2f} nats a token"
    yield f"{'':11}{'alpha':26}{'kept of those looked at':26}{'tokens a call':26}by alpha"
    for label, found in report["measured"].items():
        yield f"{label}, {found['num_answers']} answers, {found['num_tokens']} tokens"
        for name, one in found["drafters"].items():
            intervals = (one[key] for key in ("alpha", "kept", "tokens_per_target_call"))
            texts = (f"{i['value']:.3f} [{i['low']:.3f}, {i['high']:.3f}]" for i in intervals)
            cells = "".join(f"{text:26}" for text in texts)
            yield f"  {name:9}{cells}{one['tokens_of_alpha']:.3f}"


def main() -> None:
    """Reads the flags, which are the fields of `Plan`, runs and prints."""
    values = flags.FLAGS.flag_values_dict()
    plan = Plan(**{field.name: values[field.name] for field in dataclasses.fields(Plan)})
    print("\n".join(make_lines(run(plan, pathlib.Path(values["workdir"])))))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Folder of all that is made.", required=True)
    for field in dataclasses.fields(Plan):
        define: Any = flags.DEFINE_integer if field.type is int else flags.DEFINE_float
        define(field.name, field.default, field.metadata["help"])
    cli.run_main(main)
