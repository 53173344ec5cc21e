"""Answers to prompts that begin alike, as those of a conversation: only what is new is read.

    prompt 1        | system, question 1 |
    answer 1                             | a b c ... y z
    caches          | committed: all tokens but the newest, z
    prompt 2        | system, question 1 | a b c ... y z | end of the answer, question 2 |
                    | kept                             | read                            |

A prompt keeps the tokens that it has in common with the committed ones: the caches are rolled back
to their number, and the rest is read. So a chat template that changes earlier messages costs time
and changes no answer.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jspec.common.memory import Budget
from jspec.generation.answer import Answer, Round
from jspec.generation.batch import Batch, Reading
from jspec.generation.engine import VisitLength
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import Chunk
from jspec.generation.rows import Row

STOPPED = "stopped"  # a reason why an answer ends, besides those of `Result`
_ROUNDS_PER_VISIT = 2  # at least, so that the text comes smoothly


class Visit(NamedTuple):
    """What is new of an answer.

    Attributes:
      chunk: its text and tokens; with the last one comes the result.
      rounds: what the rounds did; the first is the reading of the prompt.
    """

    chunk: Chunk
    rounds: list[Round]


class Conversation:
    """A text that grows, prompt by prompt and answer by answer, in the caches of one row.

    Attributes:
      generator: what computes it.
      num_read: tokens of the last prompt that were read; the others were in the caches.
    """

    def __init__(self, generator: Generator) -> None:
        """Nothing is read yet, and no memory taken."""
        self.generator, self.num_read = generator, 0
        self._batch: Batch | None = None
        self._committed: list[int] = []  # the tokens in its caches
        self._is_stopped = False
        self._visit_length = VisitLength(_ROUNDS_PER_VISIT)

    def stop(self) -> None:
        """Ends the answer in progress after what is being computed; a signal handler may call."""
        self._is_stopped = True

    def prepare(self, prompt: Sequence[int], settings: SamplingParams) -> Budget:
        """Reads a prompt, and compiles what an answer to it needs; returns what takes memory.

        Raises:
          InputError: see `answer`.
        """
        generator = self.generator
        row = generator.round_costs.add_to(generator.make_row(Request(prompt, settings)))
        batch, reading = self._begin(row)
        while not reading.is_done:
            batch.read(reading)
        batch.insert(0, reading)
        batch.run(0)
        self._batch, self._committed = batch, list(prompt)
        return generator.budget(batch.cache_size)

    def answer(self, prompt: Sequence[int], settings: SamplingParams) -> Iterator[Visit]:
        """Answers a prompt of token ids, in visits of the device.

        Raises:
          InputError: the prompt is empty or as long as the context, a setting does not fit, or
            memory is short.
        """
        generator, request = self.generator, Request(prompt, settings)
        row = generator.round_costs.add_to(generator.make_row(request))
        answer = Answer(0, request, row, generator.target, generator.num_draft_tokens)
        self._is_stopped, self.num_read = False, 0
        batch, reading = self._begin(row)
        while not (reading.is_done or self._is_stopped):
            self.num_read += batch.read(reading)
        first = batch.insert(0, reading)
        tokens, rounds = list(row.prompt), [first]
        if reading.is_done:
            answer.add_first(first)
            tokens += first.token_ids
        else:  # that token follows from a part of the prompt
            tokens, rounds = tokens[: reading.next_chunk[0] + 1], []
        while True:
            self._batch, self._committed = batch, tokens[:-1]
            if self._is_stopped and answer.finish_reason is None:
                answer.finish_reason = STOPPED
            yield Visit(answer.take_chunk(), rounds)
            if answer.finish_reason is not None:
                generator.remember(answer, batch)
                return
            self._forget()  # until the visit has gone well
            seconds = batch.run(self._visit_length.num_rounds)
            rounds = list(batch.rounds(0))
            self._visit_length.note(seconds, len(rounds))
            answer.add_visit(seconds, rounds)
            tokens += (token for a_round in rounds for token in a_round.token_ids)

    def _forget(self) -> None:
        """Gives the caches up; programs that fail would leave them half written."""
        self._batch, self._committed = None, []

    def _begin(self, row: Row) -> tuple[Batch, Reading]:
        """Begins to read a prompt after the tokens that are in the caches already."""
        before, committed = self._batch, self._committed
        # Its last token is always read: the answer's first one follows from it.
        num_kept = num_shared(committed, row.prompt[:-1])
        generator, engine = self.generator, self.generator.engine
        begin, width = engine.chunks(len(row.prompt) - num_kept)[-1]
        # After others, the padding of the last chunk may need more slots than the answer.
        end = max(row.max_length, num_kept + begin + width if num_kept else 0)
        switches = generator.switches([row.settings])
        batch = before
        if batch is None or not batch.fits(end, switches):
            compiled = engine, generator.params, generator.compile_notice
            longest = max(end, 0 if batch is None else batch.max_length)
            batch = Batch(*compiled, 1, longest, switches)
        self._forget()
        if before is None or not num_kept:
            return batch, batch.begin(row)
        return batch, batch.begin_after(before, row, num_kept)


def num_shared(text: Sequence[int], other_text: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common at their beginnings."""
    pairs = zip(text, other_text, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
