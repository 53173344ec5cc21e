"""The answer to a request with `num_beams`: the whole search, and the texts of its beams."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.memory import CacheSize, check_memory
from jspec.common.timing import Instant
from jspec.generation.answer import AnswerText
from jspec.generation.engine import CompileNotice, Engine, describe_switches
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import Beam, Result, RoundCounts, Stats
from jspec.generation.rows import Row
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance.tree import depth_of
from jspec.speculation.beam import (
    EARLY_STOPPING,
    BeamInfo,
    BeamLimits,
    Beams,
    BeamState,
    num_candidates,
)
from jspec.speculation.types import ModelParams
from jspec.weights.resolver import LoadedModel


class BeamSearch:
    """The search for one request. Its beams are the rows of one batch.

    Attributes:
      cache_size: memory that their caches take.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        notice: CompileNotice,
        target: LoadedModel,
        request: Request,
        row: Row,
        switches: Switches,
    ) -> None:
        """Checks that there is memory for the beams, and for the prompt that is read.

        Raises:
          InputError: if there is not enough memory.
        """
        self._engine, self._params, self._notice, self._target = engine, params, notice, target
        self._request, self._row, self._switches = request, row, switches
        num_beams = row.settings.num_beams
        self._capacity = engine.capacity_for(row.max_length)
        # All beams are on every row of a mesh.
        num_bytes = (num_beams + 1) * engine.state_bytes(1, self._capacity, self._switches)
        self.cache_size = CacheSize(num_beams, self._capacity, num_bytes)
        check_memory(
            {f"caches of {self.cache_size}": num_bytes},
            "fewer beams (num_beams) or shorter texts (max_new_tokens) take less",
        )

    def run(self) -> Result:
        """Searches to the end."""
        engine, params, row = self._engine, self._params, self._row
        started, device_seconds, rounds = Instant(), 0.0, list[RoundCounts]()
        parts = [str(self.cache_size), "beam search", *describe_switches(self._switches)]
        with self._notice.around(parts, engine.widths_of(len(row.prompt) - 1)):
            state = self._begin()
            prefilled = Instant()
            is_done = False
            while not is_done:
                begin = Instant()
                state, infos, is_done = engine.search(params, state)
                device_seconds += Instant().run_seconds_since(begin)
                rounds += self._counts(infos)
        ended, beams = Instant(), jax.device_get(state.beams)
        stats = Stats(
            rounds=tuple(rounds),
            num_round_tokens=int(beams.num_steps),
            prefill_seconds=prefilled.run_seconds_since(started),
            decode_seconds=ended.run_seconds_since(prefilled),
            device_seconds=device_seconds,
            compile_seconds=ended.compile_seconds - started.compile_seconds,
            num_draft_tokens=engine.num_draft_tokens,
        )
        return self._result(beams, stats)

    def _begin(self) -> BeamState:
        """Returns the state before the first step, which is taken after the prompt's last token."""
        engine, row, settings = self._engine, self._row, self._row.settings
        read = engine.prefill(self._params, row, self._capacity, self._switches, num_unread=1)
        limits = BeamLimits(
            read.stop_ids[0],
            jnp.int32(row.max_length - len(row.prompt)),
            jnp.float32(settings.length_penalty),
            jnp.int32(EARLY_STOPPING.index(settings.early_stopping)),
        )
        state = engine.begin_beams(
            read,
            np.array(row.prompt[-1:], np.int32),
            limits,
            num_beams=settings.num_beams,
            num_candidates=num_candidates(settings.num_beams, len(set(row.stop_ids))),
            max_steps=self._capacity,
        )
        return jax.block_until_ready(state)

    def _counts(self, infos: BeamInfo) -> Iterator[RoundCounts]:
        """Yields the counts of rounds: the drafts of the beam with the most, and those kept.

        Raises:
          InputError: a tree with wrong parents, or one that is too deep.
        """
        drafter = self._engine.drafter
        names = [""] if drafter is None else [kind.drafter for kind in drafter.kinds]
        for index, (steps, proposed) in enumerate(
            zip(infos.num_steps, infos.num_proposed, strict=True)
        ):
            drafters = [names[int(kind)] for kind in infos.kind[index]]
            if infos.parents is not None:  # a drafter of the user's own may get them wrong
                assert drafter is not None
                trees = zip(drafters, proposed, infos.parents[index], strict=True)
                for name, number, parents in trees:
                    where = f" of the drafter {name!r}"
                    depth_of(parents[:number].tolist(), drafter.tree_depth, where)
            most = int(np.argmax(proposed))
            name = drafters[most] if proposed[most] > 0 else ""
            yield RoundCounts(int(proposed[most]), int(steps[0]) - 1, name)

    def _result(self, beams: Beams, stats: Stats) -> Result:
        row, error, found_beams = self._row, None, []
        if beams.has_failed:
            error = (
                f"expected logits that are numbers; the model gave NaN, or forbade every token, at "
                f"token {int(beams.num_steps) - 1} of the beams"
            )
        else:
            found_beams = [self._beam(ids, score) for ids, score in ended_beams(beams)]
        return Result(
            prompt=self._request.prompt,
            prompt_token_ids=list(row.prompt),
            token_ids=found_beams[0].token_ids if found_beams else [],
            text=found_beams[0].text if found_beams else "",
            finish_reason=found_beams[0].finish_reason if found_beams else "failed",
            settings=row.settings,
            stats=stats,
            category=self._request.category,
            error=error,
            beams=found_beams,
        )

    def _beam(self, token_ids: list[int], score: float) -> Beam:
        text = AnswerText(self._target.tokenizer, self._row.prompt, SamplingParams())
        for token_id in token_ids:
            text.push(token_id)
        text.finish()
        reason = "stop" if token_ids[-1] in self._row.settings.stop_token_ids else "length"
        reason = "eos" if token_ids[-1] in self._target.config.eos_ids else reason
        return Beam(token_ids, text.text, score, reason)


def ended_beams(beams: Beams) -> list[tuple[list[int], float]]:
    """Returns tokens and score of each beam that has ended, best first, from arrays of the host."""
    pool = beams.pool
    return [
        ([*running_beam(beams, int(length) - 1, int(parent)), int(token)], float(score))
        for score, length, parent, token in zip(*pool, strict=True)
        if score > -np.inf
    ]


def running_beam(beams: Beams, num_steps: int, beam: int) -> list[int]:
    """Returns the tokens of the beam of that number after `num_steps` steps."""
    token_ids = []
    for step in reversed(range(num_steps)):
        token_ids.append(int(beams.tokens[step, beam]))
        beam = int(beams.parents[step, beam])
    return token_ids[::-1]
