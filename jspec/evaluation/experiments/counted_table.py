"""The table of `unigram` and `bigram`, counted once for a workdir from the target's own answers."""

import dataclasses
import sys

from jspec.common.counted import counted
from jspec.common.errors import InputError, WorkdirError
from jspec.common.journal import Journal
from jspec.common.progress import Progress
from jspec.drafters.count_ngrams import count_ngrams
from jspec.drafters.ngram_table import save_table
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.generation.generator import Generator
from jspec.generation.prompts import read_prompts
from jspec.generation.request import Request, Settings
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

_FIRST_SEED = 10**9  # far from the seeds of what is measured
_BATCH_SIZE = 8


def counted_table(experiment: Experiment, target: LoadedModel, store: Store) -> str:
    """Returns the path of the workdir's table, which is made if it is missing.

    The answers are kept in `table_answers.jsonl`, so that a killed run goes on with the next one.

    Raises:
      InputError: the prompts file is unreadable or empty.
      WorkdirError: nothing can be written.
    """
    path = store.folder / "table.safetensors"
    with store.setup():
        if not path.exists():
            table = count_ngrams(_answers(experiment, target, store), used_vocab_size(target))
            try:
                save_table(table, path, target.tokenizer)
            except InputError as error:
                raise WorkdirError(str(error)) from None
    return str(path)


def _answers(experiment: Experiment, target: LoadedModel, store: Store) -> list[list[int]]:
    """Returns the ids of answers with enough tokens together; the prompts take turns."""
    spec = experiment.table
    texts = [prompt.text for prompt in read_prompts(spec.prompts_file)]
    if not texts:
        raise InputError(f"expected at least one prompt in {spec.prompts_file}, got none")
    journal = Journal(store.folder / "table_answers.jsonl")
    answers = [list(map(int, record["token_ids"])) for record in journal.read()]
    generator = Generator(
        target, drafter="none", max_seq_len=experiment.max_seq_len, batch_size=_BATCH_SIZE
    )
    print(f"counting a table on {counted(spec.num_tokens, 'token')} of the target's answers",
          file=sys.stderr, flush=True)  # fmt: skip
    progress = Progress(spec.num_tokens, _total(answers), "token")
    while _total(answers) < spec.num_tokens:
        # An answer does not depend on its batch: a resumed run may group them differently.
        numbers = range(len(answers), len(answers) + _BATCH_SIZE)
        settings = Settings(spec.max_new_tokens, spec.temperature)
        requests = [
            Request(texts[n % len(texts)], dataclasses.replace(settings, seed=_FIRST_SEED + n))
            for n in numbers
        ]
        results = generator.generate(requests, chat=experiment.wants_chat)
        for number, result in zip(numbers, results, strict=True):
            if _total(answers) < spec.num_tokens:
                journal.append({"prompt": number % len(texts), "token_ids": result.token_ids})
                answers.append(result.token_ids)
        progress.show(_total(answers))
    return answers


def _total(answers: list[list[int]]) -> int:
    return sum(map(len, answers))
