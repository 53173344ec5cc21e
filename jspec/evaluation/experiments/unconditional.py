"""How often drafts are kept where the target says whatever it likes: two Llamas from scratch.

See scripts/unconditional.py. The steps lie in a workdir; a run goes on with the first that is
missing, from that step's beginning. `jspec.evaluation.experiments.kept` says what is measured.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jspec.common.config_file import check_or_write_config, write_json
from jspec.common.errors import InputError, check_range
from jspec.drafters import DrafterOptions
from jspec.drafters.count_ngrams import count_ngrams
from jspec.drafters.ngram_table import save_table
from jspec.evaluation.experiments.kept import KeptDrafts
from jspec.generation import provenance
from jspec.generation.request import Request, Settings
from jspec.training.docstrings import read_docstrings
from jspec.training.from_scratch import HEAD_DIM, train_from_scratch, write_stand_in
from jspec.training.metrics_log import read_metrics
from jspec.training.token_texts import read_token_texts
from jspec.weights import TokenizerLike
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.tokenizers.learn_bpe import NUM_BYTES, learn_bpe

DRAFTERS = ("model", "bigram", "unigram", "random")
_BOS, _EOS = "<|begin|>", "<|end|>"
_TEMPERATURES = {"T=0": 0.0, "T=1": 1.0}
_BATCH_SIZE = 16  # answers at a time


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
        check_range("seq_len", self.seq_len, 4, 2**20)
        check_range("num_answers", self.num_answers, 1, 10**6)
        check_range("max_new_tokens", self.max_new_tokens, 2, self.seq_len - 2)
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
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the workdir {workdir}: {error.strerror}") from None
    check_or_write_config(workdir / "config.json", dataclasses.asdict(plan))
    output, corpus = workdir / "unconditional.json", workdir / "corpus.jsonl"
    if not output.exists():
        if not corpus.exists():
            write_corpus(corpus, plan.corpus_bytes)
        target, draft = train_pair(plan, workdir, corpus)
        table = workdir / "table.safetensors"
        if not table.exists():
            write_table(table, corpus, target.tokenizer)
        measured = measure(plan, corpus, table, target, draft)
        write_json(output, describe(plan, workdir, target, draft) | {"measured": measured})
    return json.loads(output.read_bytes())


def write_corpus(path: pathlib.Path, num_bytes: int) -> None:
    """Writes one docstring a line, its end marked; the file appears when it is complete."""
    lines = (json.dumps({"text": text + _EOS}) + "\n" for text in read_docstrings(num_bytes))
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def read_corpus(path: pathlib.Path) -> Iterator[str]:
    """Yields the docstrings."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"].removesuffix(_EOS)


def train_pair(
    plan: Plan, workdir: pathlib.Path, corpus: pathlib.Path
) -> tuple[LoadedModel, LoadedModel]:
    """Trains target and draft unless they are there; returns both."""
    vocabulary = workdir / "vocabulary"
    if not vocabulary.exists():
        tokenizer = learn_bpe(read_corpus(corpus), plan.vocab_size, bos=_BOS, eos=_EOS)
        write_stand_in(vocabulary, tokenizer, plan.seq_len)

    def trained(name: str, beside: pathlib.Path, num_layers: int, width: int) -> pathlib.Path:
        return train_from_scratch(
            workdir / name, texts=corpus, beside=beside, num_layers=num_layers, width=width,
            seq_len=plan.seq_len, batch_size=plan.batch_size, num_steps=plan.num_steps,
            learning_rate=plan.learning_rate,
        )  # fmt: skip

    target = trained("target", vocabulary, plan.target_layers, plan.target_width)
    draft = trained("draft", target, plan.draft_layers, plan.draft_width)
    return load_model(str(target), dtype="float32"), load_model(str(draft), dtype="float32")


def write_table(path: pathlib.Path, corpus: pathlib.Path, tokenizer: TokenizerLike) -> None:
    """Counts all unigrams and bigrams of the corpus."""
    texts = read_token_texts(str(corpus), tokenizer, with_prompts=True)
    size = tokenizer.vocab_size
    save_table(count_ngrams(texts, size, num_continuations=size), path, tokenizer)  # type: ignore


def measure(
    plan: Plan, corpus: pathlib.Path, table: pathlib.Path, target: LoadedModel, draft: LoadedModel
) -> dict[str, Any]:
    """Returns what `KeptDrafts` finds at each temperature."""
    kept = KeptDrafts(
        target,
        draft,
        DRAFTERS,
        DrafterOptions(draft_table=str(table)),
        num_draft_tokens=plan.num_draft_tokens,
        batch_size=_BATCH_SIZE,
    )
    found = {}
    for label, temperature in _TEMPERATURES.items():
        prompts = make_prompts(plan, corpus, target.tokenizer, temperature)
        requests = [
            Request(prompt, Settings(plan.max_new_tokens, temperature, seed=index))
            for index, prompt in enumerate(prompts)
        ]
        found[label] = kept.measure(requests)
    return found


def make_prompts(
    plan: Plan, corpus: pathlib.Path, tokenizer: TokenizerLike, temperature: float
) -> list[list[int]]:
    """Returns BOS alone for every answer; at temperature 0 with another first token each."""
    bos = tokenizer.encode("")
    if temperature > 0:
        return [bos] * plan.num_answers
    texts = (tokenizer.encode(text, add_bos=False) for text in read_corpus(corpus))
    firsts = collections.Counter(ids[0] for ids in texts)
    return [[*bos, token] for token, _ in firsts.most_common(plan.num_answers)]


def describe(
    plan: Plan, workdir: pathlib.Path, target: LoadedModel, draft: LoadedModel
) -> dict[str, Any]:
    """Returns where it was measured and on what; losses are on held-out texts, in nats."""
    texts = list(read_corpus(workdir / "corpus.jsonl"))
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    corpus = {"num_texts": len(texts), "sha256": digest}
    report = provenance.environment() | {"plan": dataclasses.asdict(plan), "corpus": corpus}
    for name, model in {"target": target, "draft": draft}.items():
        looks = [one["held_out"] for one in read_metrics(workdir / name) if "held_out" in one]
        report[name] = {
            "num_params": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
            "nats_per_token": looks[-1]["losses"][0],
        }
    return report


def make_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report as a table."""
    for name in ("target", "draft"):
        one = report[name]
        yield f"{name}: {one['num_params']:,} parameters, {one['nats_per_token']:.2f} nats a token"
    heads = "alpha", "kept of those looked at", "tokens a call", "by alpha"
    yield _row("", heads)
    for label, found in report["measured"].items():
        yield f"{label}, {found['num_answers']} answers, {found['num_tokens']} tokens"
        for name, one in found["drafters"].items():
            keys = "alpha", "kept", "tokens_per_target_call"
            yield _row(name, [*(_show(one[key]) for key in keys), f"{one['tokens_of_alpha']:.3f}"])


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:9}" + "".join(f"{cell:26}" for cell in cells).rstrip()


def _show(one: Mapping[str, float]) -> str:
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
