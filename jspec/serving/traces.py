"""The rounds of the newest answers, for /v1/jspec/trace."""

import threading
from typing import Any

from jspec.serving.job import Update

MAX_ROUNDS = 20_000  # of all answers together, which take about 15 MB


def rounds_of(update: Update) -> list[dict[str, Any]]:
    """Returns what the rounds of an update did; see docs/serve.md."""
    ids, traced = list(update.chunk.token_ids), list[dict[str, Any]]()
    for counts, drafts in zip(update.rounds, update.drafts, strict=True):
        num_accepted, parents = counts.num_accepted, drafts.chain_or_parents
        # An answer may end with an accepted draft.
        next_id = ids[num_accepted] if num_accepted < len(ids) else None
        kept = drafts.kept(ids[:num_accepted])
        kind = "residual" if (kept or [-1])[-1] in parents else "bonus"
        traced.append({
            "drafter": counts.drafter, "draft_ids": list(drafts.ids),
            "parents": list(drafts.parents), "kept": kept,
            "num_accepted": num_accepted, "accepted_ids": ids[:num_accepted],
            "next_id": next_id, "next": kind if next_id is not None else None,
        })  # fmt: skip
        ids = ids[num_accepted + 1 :]
    return traced


class Traces:
    """Rounds by reply and answer; the oldest reply is forgotten when there are too many."""

    def __init__(self, *, max_rounds: int = MAX_ROUNDS) -> None:
        self._max_rounds = max_rounds
        self._replies: dict[str, dict[int, dict[str, Any]]] = {}
        self._size = 0  # rounds, and one for each answer
        self._lock = threading.Lock()  # one thread computes, another answers

    def observe(self, update: Update) -> None:
        """Notes what an update brings."""
        job, ids, rounds = update.job, update.chunk.token_ids, rounds_of(update)
        with self._lock:
            answers = self._replies.setdefault(job.reply_id, {})
            if job.index not in answers:
                self._size += 1
                answers[job.index] = {"index": job.index, "first_token_id": None, "rounds": [],
                                      "finish_reason": None}  # fmt: skip
            answer = answers[job.index]
            if update.chunk.result is not None:
                answer["finish_reason"] = update.chunk.result.finish_reason
            if answer["first_token_id"] is None:
                if not ids or update.rounds:  # forgotten while it ran
                    return
                answer["first_token_id"] = ids[0]
            answer["rounds"] += rounds
            self._size += len(rounds)
            while self._size > self._max_rounds and len(self._replies) > 1:
                oldest = self._replies.pop(next(iter(self._replies)))
                self._size -= sum(
                    1 + len(answer_rounds["rounds"]) for answer_rounds in oldest.values()
                )

    def find(self, reply_id: str) -> dict[str, Any] | None:
        """Returns the answers of a reply, in order; None where it is not known any more."""
        with self._lock:
            answers = self._replies.get(reply_id)
            if answers is None:
                return None
            copies = [answers[index] | {"rounds": list(answers[index]["rounds"])}
                     for index in sorted(answers)]  # fmt: skip
        return {"id": reply_id, "object": "jspec.trace", "answers": copies}
