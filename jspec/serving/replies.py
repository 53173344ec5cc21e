"""Replies in the shapes of OpenAI's interface."""

import itertools
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from jspec.generation.result import Result, Stats, TokenLogprob
from jspec.serving.http_schema import (
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    TextCompletionChunk,
)
from jspec.serving.job import CANCELLED, EXPIRED, Update
from jspec.serving.schema import AnswerRequest
from jspec.serving.tools import CallReader
from jspec.serving.traces import rounds_of
from jspec.weights import TokenizerLike
from jspec.weights.tokenizers.text_stream import TextStream

_Logprobs = Sequence[TokenLogprob | None]  # of each token; None of the first of an echo
# An answer that its deadline has cut is one that is not complete, as "length" says.
_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", EXPIRED: "length",
                   CANCELLED: "stop"}  # fmt: skip


class Reply:
    """Makes one reply, whole or in chunks. Subclasses know its shape.

    Args:
      model: the model's name.
      tokenizer: its tokenizer.
      prompts: the token ids of each prompt; answers to the same prompt are adjacent.
      echoes: what each answer's text begins with.
      asked: the request.
    """

    prefix = kind = chunk_kind = ""
    shape: type[BaseModel]
    chunk_shape: type[BaseModel]

    def __init__(
        self,
        model: str,
        tokenizer: TokenizerLike,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        asked: AnswerRequest,
    ) -> None:
        self._asked, self.id = asked, f"{self.prefix}-{uuid.uuid4().hex}"
        self._tokenizer, self._prompts, self._echoes = tokenizer, prompts, echoes
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._streams: dict[int, Any] = {}  # of tokens' texts, by choice
        self._offsets: dict[int, tuple[Any, int]] = {}  # another such stream, and its length
        is_parallel = getattr(asked, "parallel_tool_calls", None) is not False
        is_forced = asked.pattern_field == "tool_choice"
        self._calls = defaultdict[int, CallReader](
            lambda: CallReader(is_parallel, is_forced)
        )  # by choice
        self._begun, self._num_new = set[int](), 0  # choices, and tokens of all together

    def whole(self, results: Sequence[Result], num_cached: int) -> BaseModel:
        """Returns the reply to a request that does not stream; see `usage_of`."""
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        usage = usage_of(results, self._prompts, num_cached)
        reply = {**self._head, "object": self.kind, "choices": choices, "usage": usage}
        return self.shape.model_validate(reply | speculation_metrics(results))

    def chunk(self, index: int, update: Update, has_trace: bool) -> BaseModel:
        """Returns what an update adds to an answer."""
        result, chunk = update.chunk.result, update.chunk
        is_first = index not in self._begun
        self._begun.add(index)
        text = self._echoes[index] * is_first + chunk.text
        logprobs = update.logprobs if self._asked.wants_logprobs else ()
        choice = {
            "index": index,
            **self._delta(index, text, is_first, is_last=result is not None),
            "logprobs": self._logprobs(index, chunk.token_ids, logprobs) if logprobs else None,
            "finish_reason": None if result is None else self._reason(index, result),
        }
        reply_chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        self._num_new += len(chunk.token_ids)
        options = self._asked.stream_options
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            counts = _counts(self._prompts, self._num_new)
            reply_chunk["usage"] = counts if options.continuous_usage_stats else None
        if has_trace:
            reply_chunk["jspec"] = self._trace(index, update)
        return self.chunk_shape.model_validate(reply_chunk)

    def last_chunk(self, results: Sequence[Result], num_cached: int) -> BaseModel:
        """Returns the chunk that brings the usage; see `usage_of`."""
        usage = usage_of(results, self._prompts, num_cached)
        chunk = {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}
        return self.chunk_shape.model_validate(chunk | speculation_metrics(results))

    def _trace(self, index: int, update: Update) -> dict[str, Any]:
        """Returns each token's text and where it came from, and what the rounds did."""
        if index not in self._streams:
            self._streams[index] = self._stream(index)
        stream = self._streams[index]
        sources = iter(
            traced["next"] if traced["draft_ids"] else "plain" for traced in rounds_of(update)
        )
        # The token that the prefill drew is of no round.
        pairs = zip(update.chunk.token_ids, update.is_drafted, strict=True)
        tokens = [[stream.push(token_id), "drafted" if is_drafted else next(sources, "plain")]
                  for token_id, is_drafted in pairs]  # fmt: skip
        if update.chunk.result is not None and tokens:
            tokens[-1][0] += stream.flush()  # half a character
        return {
            "tokens": tokens,
            "rounds": [[traced.num_proposed, traced.num_accepted] for traced in update.rounds],
        }

    def _stream(self, index: int) -> TextStream:
        """Returns the stream of an answer's text."""
        return self._tokenizer.stream(self._prompts[index // self._asked.n])

    def _reason(self, index: int, result: Result) -> str:
        reason = _FINISH_REASONS[result.finish_reason]
        has_calls = index in self._calls and self._calls[index].num_calls > 0
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, text: str, is_first: bool, *, is_last: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, ids: Sequence[int], logprobs: _Logprobs) -> Any:
        raise NotImplementedError


class ChatReply(Reply):
    """The reply of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    shape, chunk_shape = ChatCompletion, ChatCompletionChunk

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        message = {"role": "assistant", "refusal": None, "content": result.text}
        if self._asked.has_calls:
            delta = self._calls[index].push(result.text, is_last=True)
            calls = [{k: v for k, v in call.items() if k != "index"}
                     for call in delta.get("tool_calls", ())]  # fmt: skip
            message |= {"content": delta.get("content")} | ({"tool_calls": calls} if calls else {})
        logprobs = result.token_logprobs
        shown = None if logprobs is None else self._logprobs(index, result.token_ids, logprobs)
        reason = self._reason(index, result)
        return {"index": index, "message": message, "logprobs": shown, "finish_reason": reason}

    def _delta(self, index: int, text: str, is_first: bool, *, is_last: bool) -> dict[str, Any]:
        role = {"role": "assistant", "content": ""} if is_first else {}
        if self._asked.has_calls:
            return {"delta": role | self._calls[index].push(text, is_last=is_last)}
        return {"delta": role | ({"content": text} if text else {})}

    def _logprobs(self, index: int, ids: Sequence[int], logprobs: _Logprobs) -> Any:
        del index

        def shown(token_id: int, logprob: float) -> dict[str, Any]:
            name, known = self._tokenizer.label(token_id)
            return {"token": name, "logprob": logprob, "bytes": list(known)}

        num_top = self._asked.num_top_logprobs
        content = [
            shown(token_id, known.raw) | {"top_logprobs": [shown(*top) for top in
            known.top[:num_top]]} for token_id, known in zip(ids, logprobs, strict=True) if known is
            not None
        ]  # fmt: skip
        return {"content": content, "refusal": None}


class TextReply(Reply):
    """The reply of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    shape, chunk_shape = TextCompletion, TextCompletionChunk

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        text, reason = self._echoes[index] + result.text, self._reason(index, result)
        shown = None
        if result.token_logprobs is not None:
            shown = self._logprobs(index, result.token_ids, result.token_logprobs)
            if result.prompt_logprobs is not None:
                shown = self._with_prompt(index, result, shown)
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}

    def _delta(self, index: int, text: str, is_first: bool, *, is_last: bool) -> dict[str, Any]:
        del index, is_first, is_last
        return {"text": text}

    def _logprobs(self, index: int, ids: Sequence[int], logprobs: _Logprobs) -> Any:
        # A token begins where the text ends that was known before it.
        stream, begin = self._offsets.get(index) or (self._stream(index), len(self._echoes[index]))
        ends = [*itertools.accumulate((len(stream.push(one)) for one in ids), initial=begin)]
        self._offsets[index] = stream, ends[-1]
        return self._named(ids, logprobs) | {"text_offset": ends[:-1]}

    def _named(self, ids: Sequence[int], logprobs: _Logprobs) -> dict[str, Any]:
        num_top, label = self._asked.num_top_logprobs, self._tokenizer.label
        tops = [
            # The likeliest, and the token itself, if it is not one of them.
            known and {label(top_id)[0]: value
                       for top_id, value in (*known.top[:num_top], (token_id, known.raw))}
            for token_id, known in zip(ids, logprobs, strict=True)
        ]  # fmt: skip
        return {
            "tokens": [label(token_id)[0] for token_id in ids],
            "token_logprobs": [logprob and logprob.raw for logprob in logprobs],
            "top_logprobs": tops if num_top else None,
        }

    def _with_prompt(self, index: int, result: Result, shown: dict[str, Any]) -> dict[str, Any]:
        """Returns the log-probabilities after those of the prompt, whose first token has none."""
        ids, text = result.prompt_token_ids, self._echoes[index]
        places, place, stream = [], 0, self._tokenizer.stream()
        for token_id in ids:
            places.append(min(place, len(text)))
            place += len(stream.push(token_id))
            name, _ = self._tokenizer.label(token_id)
            # Special tokens print nothing, but may be written out in the prompt.
            if not self._tokenizer.piece(token_id, False) and text.startswith(name, place):
                place += len(name)
        assert result.prompt_logprobs is not None
        before = self._named(ids, [None, *result.prompt_logprobs]) | {"text_offset": places}
        return {
            name: None if value is None else before[name] + value for name, value in shown.items()
        }


def usage_of(
    results: Sequence[Result], prompts: Sequence[Sequence[int]], num_cached: int
) -> dict[str, Any]:
    """Returns the counts of a reply; `jspec` holds those of speculation, over all its answers.

    `num_cached` tokens of the prompts were in the prefix cache.
    """
    stats = [result.stats for result in results]
    total = Stats(
        rounds=tuple(counts for answer_stats in stats for counts in answer_stats.rounds),
        num_round_tokens=sum(answer_stats.num_round_tokens for answer_stats in stats),
        prefill_seconds=sum(answer_stats.prefill_seconds for answer_stats in stats),
        decode_seconds=sum(answer_stats.decode_seconds for answer_stats in stats),
        device_seconds=sum(answer_stats.device_seconds for answer_stats in stats),
        compile_seconds=sum(answer_stats.compile_seconds for answer_stats in stats),
        num_draft_tokens=max(answer_stats.num_draft_tokens for answer_stats in stats),
    )
    return _counts(prompts, sum(len(counts.token_ids) for counts in results)) | {
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "jspec": total.to_json() | {
            "seeds": [result.settings.seed for result in results],
            "finish_reasons": [result.finish_reason for result in results],
        },
    }  # fmt: skip


def speculation_metrics(results: Sequence[Result]) -> dict[str, Any]:
    """Returns the field `metrics` of a reply, which load generators read.

    Nothing of several answers, or of one without drafts.
    """
    stats = results[0].stats
    if len(results) > 1 or not stats.num_proposed:
        return {}
    most = max(stats.num_draft_tokens, *(a_round.num_accepted for a_round in stats.rounds), 0)
    accepted = [a_round.num_accepted for a_round in stats.rounds]
    counts = {
        "mean_acceptance_length": 1 + stats.num_accepted / stats.num_rounds,
        "draft_acceptance_rate": stats.num_accepted / stats.num_proposed,
        "acceptance_histogram": [accepted.count(number) for number in range(most + 1)],
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_proposed,
        "num_spec_steps": stats.num_rounds,
        "num_spec_tokens": most,
    }
    return {"metrics": {"speculative_decoding": counts}}


def _counts(prompts: Sequence[Sequence[int]], num_new: int) -> dict[str, Any]:
    num_prompt = sum(map(len, prompts))
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new}  # fmt: skip


def error_of(
    message: str, *, param: str | None = None, code: str | None = None, kind: str = ""
) -> dict[str, Any]:
    """Returns an error in OpenAI's shape."""
    kind = kind or "invalid_request_error"
    parts = {"message": message, "type": kind, "param": param, "code": code}
    # A client's words may have half a surrogate pair, which cannot be sent back.
    safe = {k: v and v.encode("utf-8", "backslashreplace").decode() for k, v in parts.items()}
    return {"error": safe}
