"""What clients get back, in the shapes of OpenAI's interface."""

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jspec.generation.result import Result
from jspec.generation.stats import Stats
from jspec.serving.job import CANCELLED, EXPIRED, Update
from jspec.weights import TokenizerLike

# An answer that its deadline has cut is one that is not complete, as "length" says.
_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", EXPIRED: "length",
                   CANCELLED: "stop"}  # fmt: skip


class Reply:
    """Makes the objects of one reply: whole, or in chunks. Subclasses know how a text is packed.

    Args:
      model: the model's name.
      tokenizer: its tokenizer.
      prompts: the token ids of each prompt; answers to the same one follow each other.
      echoes: what each answer's text begins with.
    """

    prefix = kind = chunk_kind = ""

    def __init__(
        self,
        model: str,
        tokenizer: TokenizerLike,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ) -> None:
        self._tokenizer, self._prompts, self._echoes = tokenizer, prompts, echoes
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip
        self._streams: dict[int, Any] = {}  # of tokens' texts, by choice
        self._begun = set[int]()

    def whole(self, results: Sequence[Result], num_cached: int) -> dict[str, Any]:
        """Returns the reply to a request that does not stream; see `usage_of`."""
        choices = [
            self._choice(index, result, self._logprobs(result.token_ids, result.raw_logprobs))
            for index, result in enumerate(results)
        ]
        usage = usage_of(results, self._prompts, num_cached)
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, index: int, update: Update, has_trace: bool) -> dict[str, Any]:
        """Returns what an update adds to an answer."""
        result, piece = update.piece.result, update.piece
        is_first = index not in self._begun
        self._begun.add(index)
        text = self._echoes[index] * is_first + piece.text
        choice = {
            "index": index,
            **self._delta(text, is_first),
            "logprobs": self._logprobs(piece.token_ids, update.logprobs or None),
            "finish_reason": None if result is None else _FINISH_REASONS[result.finish_reason],
        }
        found = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        return found | {"jspec": self._trace(index, update)} if has_trace else found

    def last_chunk(self, results: Sequence[Result], num_cached: int) -> dict[str, Any]:
        """Returns the chunk that brings the usage; see `usage_of`."""
        usage = usage_of(results, self._prompts, num_cached)
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _trace(self, index: int, update: Update) -> dict[str, Any]:
        """Returns each token's text and whether it was drafted, and what the rounds did."""
        stream = self._streams.setdefault(index, self._tokenizer.stream())
        pairs = zip(update.piece.token_ids, update.is_drafted, strict=True)
        tokens = [[stream.push(token_id), is_drafted] for token_id, is_drafted in pairs]
        if update.piece.result is not None and tokens:
            tokens[-1][0] += stream.flush()  # half a character
        return {
            "tokens": tokens,
            "rounds": [[one.num_proposed, one.num_accepted] for one in update.rounds],
        }

    def _choice(self, index: int, result: Result, logprobs: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> Any:
        raise NotImplementedError


class ChatReply(Reply):
    """The reply of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, result: Result, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        reason = _FINISH_REASONS[result.finish_reason]
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, text: str, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": role | ({"content": text} if text or is_first else {})}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> Any:
        if logprobs is None:
            return None
        texts = [self._tokenizer.decode([token_id]) for token_id in ids]
        return {
            "content": [
                # Of half a character the bytes are not known.
                {"token": text, "logprob": logprob, "top_logprobs": [],
                 "bytes": None if "\ufffd" in text else list(text.encode())}
                for text, logprob in zip(texts, logprobs, strict=True)
            ],
            "refusal": None,
        }  # fmt: skip


class TextReply(Reply):
    """The reply of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, result: Result, logprobs: Any) -> dict[str, Any]:
        text, reason = self._echoes[index] + result.text, _FINISH_REASONS[result.finish_reason]
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, text: str, is_first: bool) -> dict[str, Any]:
        del is_first
        return {"text": text}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> Any:
        if logprobs is None:
            return None
        texts = [self._tokenizer.decode([token_id]) for token_id in ids]
        offsets = [0, *itertools.accumulate(map(len, texts))][: len(texts)]
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None,
                "text_offset": offsets}  # fmt: skip


def usage_of(
    results: Sequence[Result], prompts: Sequence[Sequence[int]], num_cached: int
) -> dict[str, Any]:
    """Returns the counts of a reply; `jspec` holds those of speculation, over all its answers.

    `num_cached` tokens of the prompts were not read again, as earlier ones began with them.
    """
    stats = [result.stats for result in results]
    total = Stats(
        rounds=tuple(one for each in stats for one in each.rounds),
        num_round_tokens=sum(each.num_round_tokens for each in stats),
        prefill_seconds=sum(each.prefill_seconds for each in stats),
        decode_seconds=sum(each.decode_seconds for each in stats),
        device_seconds=sum(each.device_seconds for each in stats),
        compile_seconds=sum(each.compile_seconds for each in stats),
        num_draft_tokens=max(each.num_draft_tokens for each in stats),
    )
    num_prompt, num_new = sum(map(len, prompts)), sum(len(one.token_ids) for one in results)
    return {
        "prompt_tokens": num_prompt,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "jspec": total.to_json() | {
            "seeds": [result.settings.seed for result in results],
            "finish_reasons": [result.finish_reason for result in results],
        },
    }  # fmt: skip


def error_of(
    message: str, *, param: str | None = None, code: str | None = None, kind: str = ""
) -> dict[str, Any]:
    """Returns an error in OpenAI's shape."""
    kind = kind or "invalid_request_error"
    parts = {"message": message, "type": kind, "param": param, "code": code}
    # A client's words may have half a surrogate pair, which cannot be sent back.
    safe = {k: v and v.encode("utf-8", "backslashreplace").decode() for k, v in parts.items()}
    return {"error": safe}
