"""A chat: the messages so far, the settings, and the commands that change them."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jspec.cli.terminal import Painter, Terminal
from jspec.common.errors import InputError
from jspec.common.json_lines import JsonLinesWriter, check_unicode, read_json
from jspec.drafters import DRAFTERS
from jspec.generation.answer import Round
from jspec.generation.auto import parse_num_draft_tokens
from jspec.generation.conversation import STOPPED, Conversation, num_shared
from jspec.generation.generator import Generator
from jspec.generation.options import Method, choose_method
from jspec.generation.prompts import encode_conversation
from jspec.generation.request import SamplingParams, nth_seed
from jspec.generation.result import Result
from jspec.weights.resolver import LoadedModel

# Settings that a command changes, with what reads each; the others come from flags alone.
_SETTINGS: Mapping[str, type] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "max_new_tokens": int,
    "min_new_tokens": int, "seed": int,
}  # fmt: skip
_OF_METHOD = ("num_draft_tokens", "drafter")
_HELP = """\
/settings [NAME=VALUE ...]  shows or changes the settings
/system [TEXT]              shows or sets the system message; "" takes it away
/retry                      answers the last message anew, with the next seed
/trace [on|off]             shows the last answer round by round; on colours answers as they come
/save FILE, /load FILE      writes the conversation to a file, or goes on with one
/clear                      begins a new conversation
/help, /bye                 this text; the end, as Ctrl-D
Between two \""" a message may have several lines. Ctrl-C stops an answer."""


class Turn(NamedTuple):
    """A message of the user, and its answer."""

    message: str
    answer: str


_ENDS = ("/bye", "/exit", "/quit")
_ALONE = (*_ENDS, "/clear", "/retry", "/help", "/?")  # take no argument


class Session:
    """A conversation with a model.

    Attributes:
      turns: what was said so far.
    """

    def __init__(
        self,
        models: tuple[LoadedModel, LoadedModel | None],
        method: Method,
        settings: SamplingParams,
        terminal: Terminal,
        *,
        system: str | None = None,
        max_seq_len: int | None = None,
        has_stats: bool = True,
    ) -> None:
        """Compiles the programs, and reads what comes before the first message.

        `max_seq_len` is that of the conversation; None takes the model's context. With `has_stats`
        lines on standard error tell of the device and of each answer.

        Raises:
          InputError: options or settings that do not fit the models.
        """
        self.turns: list[Turn] = []
        self._models, self._method, self._max_seq_len = models, method, max_seq_len
        self._settings, self._system, self._terminal = settings, system, terminal
        self._has_stats, self._is_traced = has_stats, False
        self._message: str | None = None  # the last one
        self._last: tuple[Result, list[Round]] | None = None
        self._num_answers = 0  # since the seed was set
        self._conversation = Conversation(self._make_generator())
        self._commands: dict[str, Callable[[str], object]] = {
            "settings": self._change_settings, "system": self._change_system,
            "retry": self._retry, "trace": self._trace, "save": self._save, "load": self._load,
            "clear": self._clear, "help": self._help, "?": self._help,
        }  # fmt: skip
        # What two messages have in common is what comes before every first message.
        first, second = (self._encode([], text) for text in "ab")
        beginning = first[: num_shared(first, second)] or first
        budget = self._conversation.prepare(beginning, settings)
        if has_stats:
            terminal.say(f"{models[0].name} by {self._generator.drafter}, {budget}")
        if models[0].tokenizer.chat_template is None:
            why = "it continues the conversation as a plain text"
            terminal.say(f"note: {models[0].name} has no chat template: {why}")

    @property
    def _generator(self) -> Generator:
        return self._conversation.generator

    def _make_generator(self) -> Generator:
        say = self._terminal.say if self._has_stats else None
        return Generator(*self._models, self._method, max_seq_len=self._max_seq_len, notify=say)

    def take(self, line: str) -> bool:
        """Does what a command says, or answers a message; False if that ends the chat.

        Raises:
          InputError: a wrong command, or a message that cannot be answered. The chat may go on.
        """
        name, _, argument = line.partition(" ")
        name = name.partition("\n")[0]
        # The path of a file is no command.
        if not line or not name.startswith("/") or "/" in name[1:]:
            if line:
                self._answer(line, self.turns)
            return True
        argument = argument.strip()
        if argument and name in _ALONE:
            raise InputError(f"expected {name} alone, got it with {argument!r}")
        if name in _ENDS:
            return False
        command = self._commands.get(name[1:])
        if command is None:
            raise InputError(f"unknown command {name!r}: /help lists the commands")
        command(argument)
        return True

    def _encode(self, before: list[Turn], message: str) -> list[int]:
        messages, answers = [turn.message for turn in before], [turn.answer for turn in before]
        target, system = self._models[0], self._system
        return encode_conversation(target, [*messages, message], answers, chat=None, system=system)

    def _answer(self, message: str, before: list[Turn]) -> None:
        prompt, most = self._encode(before, message), self._generator.max_seq_len
        if len(prompt) >= most:
            long = f"the conversation would have {len(prompt)} tokens, and the context has {most}"
            raise InputError(f"{long}: shorten the message, or begin anew with /clear")
        self._message, self._last = message, None
        seed = nth_seed(self._settings.seed, self._num_answers)
        settings = dataclasses.replace(self._settings, seed=seed)
        try:
            with self._terminal.interrupts(self._conversation.stop):
                result = self._show(prompt, settings)
        except KeyboardInterrupt:  # the second one does not wait; what was said is lost
            if not self._terminal.is_interactive:
                raise
            self._terminal.write("\n")
            self._terminal.say("interrupted: the answer is forgotten")
            return
        self._num_answers += 1
        if result.error is not None:
            raise InputError(result.error)
        # Of a message without an answer the model hears nothing more; /retry still knows it.
        is_heard = result.finish_reason != STOPPED or result.text
        self.turns = [*before, Turn(message, result.text)] if is_heard else before
        if self._has_stats:
            self._terminal.say(self._describe(result), is_dim=True)
        if result.finish_reason == "length" and len(prompt) + len(result.token_ids) >= most:
            self._terminal.say(f"note: the context of {most} tokens is full: /clear begins anew")

    def _show(self, prompt: list[int], settings: SamplingParams) -> Result:
        terminal, tokenizer, rounds = self._terminal, self._models[0].tokenizer, list[Round]()
        painter = Painter(tokenizer.stream(prompt)) if self._is_traced else None
        result = None
        for visit in self._conversation.answer(prompt, settings):
            rounds += visit.rounds
            text, result = terminal.clean(visit.chunk.text), visit.chunk.result
            terminal.write(text if painter is None else painter.paint(text, visit.rounds))
        terminal.write("\n")
        assert result is not None  # the last chunk has it
        self._last = result, rounds
        return result

    def _describe(self, result: Result) -> str:
        stats, num_tokens = result.stats, len(result.token_ids)
        rate, per_call = stats.tokens_per_second, stats.tokens_per_target_call
        parts = [f"{num_tokens} token{'s' * (num_tokens != 1)} ({result.finish_reason})"]
        parts += [] if rate is None else [f"{rate:.1f} tokens/s"]
        parts += [] if per_call is None else [f"{per_call:.2f} tokens a call"]
        total, read = len(result.prompt_token_ids), self._conversation.num_read
        parts.append(f"read {read} of {total} tokens in {stats.prefill_seconds:.2f} s")
        return f"[{', '.join(parts)}]"

    def _change_settings(self, argument: str) -> None:
        if not argument:
            values = {name: getattr(self._settings, name) for name in _SETTINGS}
            values |= {"num_draft_tokens": self._method.num_draft_tokens}
            values |= {"drafter": self._generator.drafter}
            shown = "\n".join(f"{name}={value}" for name, value in values.items())
            return self._terminal.say(shown)
        words = argument.split()
        # NAME VALUE as well.
        pairs = [f"{words[0]}={words[1]}"] if len(words) == 2 and "=" not in argument else words
        settings, method = self._settings, dict[str, Any]()
        for pair in pairs:
            name, sign, value = pair.partition("=")
            if name not in (*_SETTINGS, *_OF_METHOD) or not (sign and value):
                known = ", ".join((*_SETTINGS, *_OF_METHOD))
                raise InputError(f"expected NAME=VALUE with a name among {known}; got {pair!r}")
            if name == "num_draft_tokens":
                method[name] = parse_num_draft_tokens(value)
            elif name == "drafter":
                method[name] = value
            else:
                settings = dataclasses.replace(settings, **{name: _number(name, value)})
        self._settings, before = settings, self._settings
        if settings.seed != before.seed:
            self._num_answers = 0
        if method:
            self._change_method(method)
        self._terminal.say(f"set {' '.join(pairs)}")

    def _change_method(self, changes: dict[str, Any]) -> None:
        """Goes on with another generator, which reads the conversation anew."""
        before, (target, draft) = self._method, self._models
        try:
            options = vars(before) | changes
            self._method = choose_method(options, target, has_draft=draft is not None)
            self._conversation = Conversation(self._make_generator())
        except InputError:
            self._method = before
            raise

    def _change_system(self, argument: str) -> None:
        if not argument:
            shown = "no system message" if self._system is None else self._system
            return self._terminal.say(shown)
        before, self._system = self._system, None if argument == '""' else argument
        try:
            self._encode([], "a")  # the template may refuse it
        except InputError:
            self._system = before
            raise
        done = "set" if self._system is not None else "removed"
        self._terminal.say(f"{done} the system message, for the whole conversation")

    def _retry(self, argument: str) -> None:
        if self._message is None:
            raise InputError("expected a message before /retry, got none")
        if self._settings.temperature == 0:
            self._terminal.say("note: at temperature 0 the answer is the same: /settings "
                               "temperature=0.7")  # fmt: skip
        is_heard = bool(self.turns) and self.turns[-1].message == self._message
        self._answer(self._message, self.turns[:-1] if is_heard else self.turns)

    def _trace(self, argument: str) -> None:
        if argument in ("on", "off"):
            if argument == "on" and not self._terminal.has_colours:
                raise InputError("expected a terminal with colours; /trace alone needs none")
            self._is_traced = argument == "on"
        elif argument:
            raise InputError(f"expected /trace, /trace on or /trace off, got {argument!r}")
        elif self._last is None or not self._last[0].token_ids:
            raise InputError("expected an answer before /trace, got none")
        else:
            self._terminal.write(f"{self._picture(*self._last)}\n")

    def _picture(self, result: Result, rounds: list[Round]) -> str:
        from jspec.lab.analysis.trace import to_terminal
        from jspec.lab.benchmarking.tracing import round_record, with_texts

        first, *later = rounds
        records, num_left = list[dict[str, Any]](), len(result.token_ids) - 1
        for a_round, counts in zip(later, result.stats.rounds, strict=False):
            emitted = a_round.token_ids[:num_left]  # none after a stop string
            records.append(round_record(a_round.drafts, counts.num_accepted, emitted))
            num_left -= len(emitted)
        texts = with_texts(self._models[0].tokenizer, result.prompt_token_ids, first.token_ids[0],
                           records)  # fmt: skip
        settings = dataclasses.asdict(result.settings)
        values = {"settings": settings, "prompt": self._message}
        trace = self._generator.describe() | values | texts
        return to_terminal(trace, has_colours=self._terminal.has_colours)

    def _save(self, argument: str) -> None:
        if not argument:
            raise InputError("expected /save FILE, got no file")
        path = pathlib.Path(argument).expanduser()
        if path.exists():
            try:
                _read_conversation(path)
            except InputError as error:
                why = "another file is there" if path.is_file() else error
                raise InputError(f"cannot write {argument}: {why}") from None
        pairs = [("system", self._system)] if self._system is not None else []
        for turn in self.turns:
            pairs += [("user", turn.message), ("assistant", turn.answer)]
        messages = [{"role": role, "content": content} for role, content in pairs]
        record = {"target": self._models[0].name, "messages": messages}
        JsonLinesWriter(str(path)).rewrite(record, is_complete=True)
        self._terminal.say(f"saved {_count(self.turns)} to {path}")

    def _load(self, argument: str) -> None:
        if not argument:
            raise InputError("expected /load FILE, got no file")
        self._system, self.turns = _read_conversation(pathlib.Path(argument).expanduser())
        self._message, self._last = self.turns[-1].message if self.turns else None, None
        self._terminal.say(f"loaded {_count(self.turns)}")

    def _clear(self, argument: str) -> None:
        self.turns, self._message, self._last, self._num_answers = [], None, None, 0
        self._terminal.say("a new conversation; system message and settings stay")

    def _help(self, argument: str) -> None:
        self._terminal.say(f"{_HELP}\ndrafters for /settings: {', '.join(DRAFTERS)}")


def _number(name: str, text: str) -> float:
    kind = _SETTINGS[name]
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise InputError(f"expected {name} to be {expected}, got {text!r}") from None


def _count(turns: list[Turn]) -> str:
    return "1 answer" if len(turns) == 1 else f"{len(turns)} answers"


def _read_conversation(path: pathlib.Path) -> tuple[str | None, list[Turn]]:
    """Returns the system message and the turns in a file.

    Raises:
      InputError: it is missing, or holds no conversation.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file")
    messages = read_json(path).get("messages")
    wrong = InputError(
        f'{path}: expected {{"messages": [...]}} with messages of user and assistant by turns, '
        "after at most one of system"
    )
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise wrong
    pairs = [(message.get("role"), message.get("content")) for message in messages]
    if not all(isinstance(content, str) for _, content in pairs):
        raise wrong
    for _, content in pairs:
        check_unicode(content, str(path))
    system = pairs.pop(0)[1] if pairs and pairs[0][0] == "system" else None
    if [role for role, _ in pairs] != ["user", "assistant"] * (len(pairs) // 2):
        raise wrong
    said = [content for _, content in pairs]
    if not all(said[::2]):
        raise wrong
    return system, [Turn(*pair) for pair in zip(said[::2], said[1::2], strict=True)]
