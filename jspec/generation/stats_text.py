"""An answer's statistics in a few lines, for people."""

import collections
import statistics

from jspec.generation.costs import RoundCosts
from jspec.generation.result import Result
from jspec.generation.stats import by_drafter


def format_stats(
    result: Result, number: int | str, costs: RoundCosts | None = None, context: int = 0
) -> str:
    """Returns an answer's statistics, for people.

    Args:
      result: the answer.
      number: of drafts a round, or "auto".
      costs: of rounds, where they are known.
      context: slots of the answer's cache, for which costs are looked up.
    """
    stats = result.stats
    rate = "-" if stats.tokens_per_second is None else f"{stats.tokens_per_second:.1f}"
    line = (
        f"{len(result.token_ids)} tokens ({result.finish_reason}), {rate} tokens/s; "
        f"prefill {stats.prefill_seconds:.2f} s, decode {stats.decode_seconds:.2f} s, "
        f"compile {stats.compile_seconds:.2f} s"
    )
    accepted = "no drafts"
    if stats.acceptance_rate is not None:
        members = by_drafter(stats.rounds).items()
        shares = [f"{name} {own['num_accepted']} of {own['num_proposed']}" for name, own in members]
        of_number = "" if isinstance(number, str) else f", {number} a round"
        proposed = "draft" if stats.num_proposed == 1 else "drafts"
        shown = f"{', '.join(shares)} {proposed}{of_number}"
        accepted = f"acceptance {stats.acceptance_rate:.1%} ({shown})"
    per_call = stats.tokens_per_target_call
    calls = "-" if per_call is None else f"{per_call:.2f}"
    text = f"{line}\n{accepted}, {calls} tokens per target call"
    if isinstance(number, str):  # auto
        chosen = collections.Counter(one.num_proposed for one in stats.rounds)
        counts = ", ".join(f"{drafts} in {times}" for drafts, times in sorted(chosen.items()))
        text += f"\nauto: drafts in rounds: {counts or 'no rounds'}"
    steps = None if costs is None else costs.plain_steps(stats.rounds, context)
    if steps is not None:
        text += f"; a round cost {steps:.2f} plain steps, as measured on this machine"
    if result.beams:
        scores = ", ".join(f"{beam.score:.4f}" for beam in result.beams)
        per_token = stats.target_calls_per_token
        text += (
            f"\n{len(result.beams)} beams, {per_token:.2f} target calls per token; scores {scores}"
        )
    if result.logprobs is not None and result.raw_logprobs is not None:
        mean, raw = (statistics.fmean(own) for own in (result.logprobs, result.raw_logprobs))
        text += f"\nmean log-probability {mean:.4f} as sampled, {raw:.4f} raw"
    return text
