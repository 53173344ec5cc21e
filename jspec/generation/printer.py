"""Answers as a person sees them: text on standard output, statistics on standard error."""

import sys

from jspec.generation.result import Piece, Result


class Printer:
    """Shows answers to a person: text on standard output, statistics on standard error.

    Attributes:
      stream: print text as it comes, not answer by answer.
      stats: print statistics after each answer.
      notes: lines to begin with, on standard error.
      has_titles: print a line with the prompt's number before each answer.
    """

    def __init__(self, *, stream: bool, stats: bool, notes: list[str], has_titles: bool) -> None:
        self._stream, self._stats, self._has_titles = stream, stats, has_titles
        self._notes = notes
        self._begun: set[int] = set()

    def show(self, piece: Piece) -> None:
        """Prints what is new."""
        for note in self._notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
        self._notes = []
        if not self._stream and piece.result is None:
            return
        if self._has_titles and piece.index not in self._begun:
            print(f"--- prompt {piece.index} ---")
            self._begun.add(piece.index)
        text = piece.text if self._stream or piece.result is None else piece.result.text
        print(text, end="", flush=True)
        if piece.result is not None:
            print(flush=True)
            if self._stats:
                title = f"prompt {piece.index}: " if self._has_titles else ""
                print(title + format_stats(piece.result), file=sys.stderr, flush=True)


def format_stats(result: Result) -> str:
    """Returns an answer's statistics in two lines, a third with log-probabilities."""
    stats = result.stats
    rate = "-" if stats.tokens_per_second is None else f"{stats.tokens_per_second:.1f}"
    line = (
        f"{len(result.token_ids)} tokens ({result.finish_reason}), {rate} tokens/s; "
        f"prefill {stats.prefill_seconds:.2f} s, decode {stats.decode_seconds:.2f} s, "
        f"compile {stats.compile_seconds:.2f} s"
    )
    accepted = "no drafts"
    if stats.acceptance_rate is not None:
        accepted = (
            f"acceptance {stats.acceptance_rate:.1%} ({stats.num_accepted} of "
            f"{stats.num_proposed} drafts)"
        )
    per_call = stats.tokens_per_target_call
    calls = "-" if per_call is None else f"{per_call:.2f}"
    text = f"{line}\n{accepted}, {calls} tokens per target call"
    if result.logprobs is not None and result.raw_logprobs is not None:
        count = len(result.logprobs)
        text += (
            f"\nmean log-probability {sum(result.logprobs) / count:.4f} as sampled, "
            f"{sum(result.raw_logprobs) / count:.4f} raw"
        )
    return text
