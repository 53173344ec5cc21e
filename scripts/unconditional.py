"""How often a small model's drafts are kept where its target says whatever it likes.

`python scripts/unconditional.py --workdir=runs/unconditional`

In kind of the first rows of Table 3 of Leviathan et al., arXiv 2211.17192, section 4.2: there a
decoder of 97M parameters, trained on lm1b, is drafted for by one of 6M (alpha 0.88 at temperature
0, 0.89 at 1), by bigrams (0.05) and by unigrams (0.03), on unconditional text. Here two Llamas are
trained from scratch, by cross-entropy on the docstrings of Python's standard library, which every
machine has, in BPE tokens learnt from them. Other models, texts and tokens: compare orders, not
digits.

At temperature 1 every answer goes on from BOS alone, with a seed of its own. At temperature 0 there
is but one such text: each answer is given another first token, the most frequent of the corpus. An
answer ends where the model ends it. Measured are alpha = E[sum min(target, draft)] on plain
answers, and in rounds of other seeds the drafts kept of those looked at, and tokens a call of the
target, beside what the paper's equation 1 makes of alpha. Intervals of 95 % resample answers.

The steps lie in the workdir; the same command goes on with the first that is missing:

    corpus.jsonl  vocabulary/  target/  draft/  table.safetensors  unconditional.json

Both trainings are runs of `jspec.train`. They want a model that they draft for: the target's is
`vocabulary/`, a tiny random one that lends its tokens. What the log of that run says of tokens a
call compares the target with noise and means nothing; for this reason it looks only once.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from jspec import cli, provenance
from jspec.analysis.estimates import Estimator
from jspec.analysis.improvement import expected_tokens
from jspec.analysis.intervals import mean_and_interval
from jspec.drafters import DrafterOptions, without_unread
from jspec.errors import InputError, check_range
from jspec.experiments.config_file import check_or_write_config, write_json
from jspec.generator import Generator
from jspec.models import LlamaConfig
from jspec.request import Request, Result, Settings
from jspec.token_texts import read_token_texts
from jspec.training.docstrings import read_docstrings
from jspec.training.draft_model import DraftModelTraining
from jspec.training.metrics_log import read_metrics
from jspec.training.recipe import Recipe
from jspec.training.run import run_training
from jspec.weights.count_ngrams import count_ngrams
from jspec.weights.hf import save_hf
from jspec.weights.ngram_table import save_table
from jspec.weights.random_weights import random_params
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.tokenizer import Tokenizer, TokenizerLike

DRAFTERS = ("model", "bigram", "unigram", "random")
BOS, EOS = "<|begin|>", "<|end|>"
_HEAD_DIM = 32
_ROWS = 16  # answers at a time
_NUM_HELD_OUT = 64
_TEMPERATURES = {"T=0": 0.0, "T=1": 1.0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How large everything is; for each field there is a flag.

    Attributes:
      corpus_bytes: of docstrings.
      vocab_size: tokens, bytes and the two ends included.
      target_layers: of the target.
      target_dim: its width, a multiple of 32, like the draft's.
      draft_layers: of the draft.
      draft_dim: its width.
      seq_len: tokens of a row in training, and the context of both models.
      batch_size: rows.
      num_steps: updates of each model.
      learning_rate: of both.
      num_answers: at each temperature.
      max_new_tokens: of an answer.
      num_draft_tokens: a round.
    """

    corpus_bytes: int = 1_500_000
    vocab_size: int = 1024
    target_layers: int = 4
    target_dim: int = 192
    draft_layers: int = 2
    draft_dim: int = 64
    seq_len: int = 256
    batch_size: int = 8
    num_steps: int = 1000
    learning_rate: float = 2e-3
    num_answers: int = 160
    max_new_tokens: int = 128
    num_draft_tokens: int = 4

    def __post_init__(self) -> None:
        check_range("vocab_size", self.vocab_size, 258, 65536)
        check_range("num_answers", self.num_answers, 1, 10**6)
        for name in ("target_dim", "draft_dim"):
            if getattr(self, name) < _HEAD_DIM or getattr(self, name) % _HEAD_DIM:
                raise InputError(
                    f"expected {name} to be a multiple of {_HEAD_DIM}, got {getattr(self, name)}"
                )


_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all that is made.", required=True)
for _field in dataclasses.fields(Plan):
    _define = flags.DEFINE_float if _field.type is float else flags.DEFINE_integer
    _define(_field.name, _field.default, "See `Plan`.")  # type: ignore[arg-type]


def main() -> None:
    """Reads the flags, runs and prints."""
    names = [field.name for field in dataclasses.fields(Plan)]
    report = run(Plan(**{name: flags.FLAGS[name].value for name in names}),
                 pathlib.Path(_WORKDIR.value))  # fmt: skip
    print("\n".join(make_lines(report)))


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
    output = workdir / "unconditional.json"
    if not output.exists():
        corpus, vocabulary = workdir / "corpus.jsonl", workdir / "vocabulary"
        if not corpus.exists():
            write_corpus(corpus, plan.corpus_bytes)
        if not vocabulary.exists():
            write_vocabulary(vocabulary, corpus, plan)
        target = train_model(
            plan, workdir / "target", corpus, vocabulary, plan.target_layers, plan.target_dim
        )
        draft = train_model(
            plan, workdir / "draft", corpus, target, plan.draft_layers, plan.draft_dim
        )
        models = [load_model(str(folder), dtype="float32") for folder in (target, draft)]
        table = workdir / "table.safetensors"
        if not table.exists():
            texts = read_token_texts(str(corpus), models[0].tokenizer, with_prompts=True)
            size = models[0].tokenizer.vocab_size
            save_table(count_ngrams(texts, size, num_continuations=size), table,
                       models[0].tokenizer)  # fmt: skip
        write_json(output, describe(plan, workdir, models) | measure(plan, corpus, table, *models))
    return json.loads(output.read_bytes())


def write_corpus(path: pathlib.Path, num_bytes: int) -> None:
    """Writes one docstring a line, its end marked; the file appears when it is complete."""
    lines = (json.dumps({"text": text + EOS}) + "\n" for text in read_docstrings(num_bytes))
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def write_vocabulary(folder: pathlib.Path, corpus: pathlib.Path, plan: Plan) -> None:
    """Learns BPE tokens from the corpus, and writes them with a tiny random model."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text.removesuffix(EOS) for text in read_corpus(corpus)), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=[BOS, "$A"], special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": BOS, "eos_token": EOS})
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, embed_dim=8, hidden_dim=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_seq_len=plan.seq_len, bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
    )  # fmt: skip
    save_hf(folder, config, random_params(config, 0, "bfloat16"), tokenizer=tokenizer)


def read_corpus(path: pathlib.Path) -> Iterator[str]:
    """Yields the texts."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"]


def train_model(
    plan: Plan, workdir: pathlib.Path, corpus: pathlib.Path, beside: pathlib.Path, num_layers: int,
    width: int,
) -> pathlib.Path:  # fmt: skip
    """Trains a Llama by cross-entropy alone, unless it is there; returns its folder.

    Args:
      plan: sizes.
      workdir: of the run; see `jspec.train`.
      corpus: what to train on.
      beside: the folder of a model whose tokens it takes, and with which it is compared.
      num_layers: of the model.
      width: of its residual stream; three times as much in between.
    """
    training = DraftModelTraining(
        target=str(beside), dtype="float32", texts=(str(corpus),), num_held_out=_NUM_HELD_OUT,
        seq_len=plan.seq_len, batch_size=plan.batch_size, num_layers=num_layers, embed_dim=width,
        hidden_dim=3 * width, num_heads=width // _HEAD_DIM, num_kv_heads=width // _HEAD_DIM,
        cross_entropy_weight=1.0, kl_weight=0.0,
        recipe=Recipe(
            num_steps=plan.num_steps, learning_rate=plan.learning_rate, max_norm=1.0,
            evaluate_every=plan.num_steps,
        ),
    )  # fmt: skip
    workdir.mkdir(exist_ok=True)
    folder = workdir / training.OUTPUT
    if not folder.exists():
        run_training(training, workdir)
    return folder


def measure(
    plan: Plan, corpus: pathlib.Path, table: pathlib.Path, target: LoadedModel, draft: LoadedModel
) -> dict[str, Any]:
    """Returns what each drafter comes to at each temperature, and on how many tokens."""
    options = {name: without_unread(name, DrafterOptions(draft_table=str(table)))
               for name in DRAFTERS}  # fmt: skip
    drafts = {name: draft if name == "model" else None for name in DRAFTERS}
    plain = Generator(target, drafter="none", batch_size=_ROWS)
    estimator = Estimator(target)
    laws = {name: estimator.make_law(name, options[name], drafts[name]) for name in DRAFTERS}
    speculating = {
        name: Generator(target, drafts[name], drafter=name, drafter_options=options[name],
                        num_draft_tokens=plan.num_draft_tokens, batch_size=_ROWS)
        for name in DRAFTERS
    }  # fmt: skip
    found: dict[str, Any] = {}
    for label, temperature in _TEMPERATURES.items():
        prompts = make_prompts(plan, corpus, target.tokenizer, temperature)
        answers = plain.generate(make_requests(plan, prompts, temperature, first_seed=0))
        sums = [
            {name: estimator.estimate(law, one.settings, one.prompt_token_ids, one.token_ids)
             for name, law in laws.items()}
            for one in answers
        ]  # fmt: skip
        again = make_requests(plan, prompts, temperature, first_seed=10**6)
        found[label] = {"num_tokens": sum(one["model"]["num_tokens"] for one in sums)} | {
            name: expected([one[name] for one in sums], plan.num_draft_tokens)
            | observed(generator.generate(again))
            for name, generator in speculating.items()
        }
    return {"measured": found}


def make_prompts(
    plan: Plan, corpus: pathlib.Path, tokenizer: TokenizerLike, temperature: float
) -> list[list[int]]:
    """Returns BOS alone for every answer; at temperature 0 with another first token each."""
    bos = tokenizer.encode("")
    if temperature:
        return [bos] * plan.num_answers
    firsts = collections.Counter(
        tokenizer.encode(text[:64], add_bos=False)[0] for text in read_corpus(corpus)
    )
    return [[*bos, token] for token, _ in firsts.most_common(plan.num_answers)]


def make_requests(
    plan: Plan, prompts: Sequence[Sequence[int]], temperature: float, first_seed: int
) -> list[Request]:
    """Returns the requests; each has a seed of its own."""
    return [
        Request(prompt, Settings(max_new_tokens=plan.max_new_tokens, temperature=temperature,
                                 seed=first_seed + index))
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip


def expected(sums: Sequence[Mapping[str, Any]], num_draft_tokens: int) -> dict[str, Any]:
    """Returns alpha with its interval, and the tokens a call that follow (equation 1)."""
    columns = (np.array([one[key] for one in sums]) for key in ("sum_overlap", "num_places"))
    alpha = mean_and_interval(*columns)
    return {
        "alpha": alpha._asdict(),
        "tokens_of_alpha": expected_tokens(min(alpha.value, 1.0), num_draft_tokens),
    }


def observed(results: Sequence[Result]) -> dict[str, Any]:
    """Returns drafts kept of those looked at, and tokens a call; see `Interval`.

    A round looks at its drafts up to the first that is not kept.
    """
    rounds = [result.stats.rounds for result in results]
    kept = np.array([sum(r.num_accepted for r in own) for own in rounds])
    refused = np.array([sum(r.num_accepted < r.num_proposed for r in own) for own in rounds])
    tokens = np.array([result.stats.num_round_tokens for result in results])
    calls = np.array([len(own) for own in rounds])
    return {
        "kept": mean_and_interval(kept, kept + refused)._asdict(),
        "tokens_per_target_call": mean_and_interval(tokens, calls)._asdict(),
    }


def describe(plan: Plan, workdir: pathlib.Path, models: Sequence[LoadedModel]) -> dict[str, Any]:
    """Returns where it was measured and of what; a model's loss is on held-out texts, in nats."""
    texts = list(read_corpus(workdir / "corpus.jsonl"))
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    report = provenance.environment() | {"plan": dataclasses.asdict(plan)}
    report["corpus"] = {"num_texts": len(texts), "sha256": digest}
    for name, model in zip(("target", "draft"), models, strict=True):
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
    yield (f"{'':12}{'alpha':24}{'kept of those looked at':26}{'tokens a call':24}"
           "equation 1")  # fmt: skip
    for label, found in report["measured"].items():
        yield f"{label}, {found['num_tokens']} tokens"
        for name in DRAFTERS:
            one = found[name]
            yield (f"  {name:10}{_show(one['alpha']):24}{_show(one['kept']):26}"
                   f"{_show(one['tokens_per_target_call']):24}{one['tokens_of_alpha']:.3f}")  # fmt: skip


def _show(one: Mapping[str, float]) -> str:
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


if __name__ == "__main__":
    cli.run_main(main)
