"""A tokenizer and its files: text to ids and back, the chat template, the ids that end a text."""

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json
from jspec.weights.tokenizers.text_stream import PieceReader, TokenTexts

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@functools.cache  # compiling a template takes longer than running it
def _compile(template: str) -> Any:
    """Returns the template, in a sandbox with the globals, filters and tags that it relies on."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's words; they pass as is."""

        tags = {"generation"}  # noqa: RUF012 (Jinja2's own declaration)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    # Unlike Jinja2's own filter, without HTML escapes.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the prompt of a conversation, ready for the assistant's next words.

    Messages have a `role` and a `content`; tools are functions as OpenAI describes them. The
    special tokens, `bos_token` and the like, are variables of the template, Jinja2's source.

    Raises:
      InputError: the template is broken or refuses the messages, or leaves out a part of them.
    """
    text = _render(template, messages, special_tokens, tools)
    marked, marked_tools, places = _with_marks(messages, tools)
    try:
        shown = _render(template, marked, special_tokens, marked_tools)
    except InputError:  # it wants other words than marks, and has taken the real ones
        return text
    for mark, place in places.items():
        if mark not in shown:
            why = "the model's chat template leaves them out, and the model would not see them"
            raise InputError(f"expected no {place}: {why}")
    return text


def _with_marks(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Returns messages and tools with a mark in the place of each part, and what the marks are."""
    places: dict[str, str] = {}

    def mark(place: str) -> str:
        name = f"part{len(places)}mark"
        places[name] = place
        return name

    marked = []
    for index, message in enumerate(messages):
        copy, where = dict(message), f"messages[{index}]"
        if message.get("content"):
            copy["content"] = mark(f"content of the role {message.get('role')!r} in {where}")
        if message.get("tool_calls"):
            copy["tool_calls"] = []
            for call in message["tool_calls"]:
                name = mark(f"tool_calls in {where}")
                arguments = dict.fromkeys(call["function"]["arguments"], name)
                function = {"name": name, "arguments": arguments}
                copy["tool_calls"].append(dict(call) | {"function": function})
        marked.append(copy)
    named = [
        dict(tool) | {"function": tool["function"] | {"name": mark("tools")}} for tool in tools
    ]
    return marked, named, places


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    import jinja2

    try:
        return _compile(template).render(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except (
        jinja2.TemplateError, TypeError, LookupError, ValueError, ArithmeticError, RecursionError
    ) as error:  # fmt: skip
        message = " ".join(str(error).split())
        raise InputError(f"the chat template refuses the messages: {message}") from None


class Tokenizer(TokenTexts):
    """A `tokenizers.Tokenizer` with its special tokens, chat template and ids that end a text.

    Attributes:
      vocab_size: one more than the highest id in use; a model may have more rows (padding).
      bos_id: the id that begins a text, or None.
      eos_ids: the ids that end a text.
      special_tokens: `bos_token`, `eos_token` and the like, by these names.
      chat_template: the Jinja2 source for `chat_prompt`, or None.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wraps a `tokenizers.Tokenizer`, whose post-processor adds BOS if the model wants it.

        `eos_ids` are ids that end a text, besides that of `special_tokens["eos_token"]`.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._pieces = backend, PieceReader(backend)
        self._added = backend.get_added_tokens_decoder()
        self._read_piece = functools.cache(self._find_piece)
        self.vocab_size = max(self.vocabulary().values(), default=-1) + 1
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.bos_id, own_eos = (
            backend.token_to_id(special_tokens[name]) if name in special_tokens else None
            for name in ("bos_token", "eos_token")
        )
        ids = [*eos_ids] if own_eos is None else [*eos_ids, own_eos]
        self.eos_ids = tuple(dict.fromkeys(ids))

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Returns the ids of a text.

        Special tokens written out in it (a rendered chat prompt) become their ids. `add_bos`: begin
        with BOS if the model wants one; a text that already does gets no second.

        Raises:
          InputError: the text is not valid Unicode.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_bos).ids
        except (TypeError, UnicodeError):
            raise InputError("the text is not valid UTF-8") from None
        if add_bos and self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            return ids[1:]
        return ids

    def piece(self, token_id: int, is_first: bool) -> bytes:
        """See `TokenTexts`."""
        return self._read_piece(token_id, is_first)

    def _find_piece(self, token_id: int, is_first: bool) -> bytes:
        added, name = self._added.get(token_id), self._backend.id_to_token(token_id)
        if name is None or (added is not None and added.special):
            return b""
        return self._pieces.piece(name, is_added=added is not None, is_first=is_first)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Returns the text of a conversation, to be encoded with `add_bos=False`.

        Raises:
          InputError: no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template: give the prompt with --nochat")
        return render_chat(self.chat_template, messages, self.special_tokens, tools)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    def save(self, folder: pathlib.Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json into a folder."""
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        generation = {"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids)}
        save_json(folder / "tokenizer_config.json", settings)
        save_json(folder / "generation_config.json", generation)


def add_bos(backend: Any, bos_token: str | None, is_wanted: bool) -> None:
    """Makes a `tokenizers.Tokenizer` begin every text with BOS, or not; no BOS changes nothing."""
    from tokenizers import processors

    bos_id = None if bos_token is None else backend.token_to_id(bos_token)
    if bos_id is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos_token, "$A"] if is_wanted else ["$A"], special_tokens=[(bos_token, bos_id)]
        )


def _special_tokens(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens by name; a file spells them as text or `{"content": text}`."""
    merged = read_json(folder / "special_tokens_map.json") | settings
    values = {name: merged.get(name) for name in _SPECIAL_TOKENS}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
    """Returns the default chat template; a file of its own comes first."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise InputError(f"{folder}: expected chat_template to be a text, got {template!r}")
    return template


def _eos_ids(folder: pathlib.Path) -> list[int]:
    ids = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise InputError(f"{folder / name}: expected eos_token_id to be ids, got {value!r}")
    return ids


def _backend_of(folder: pathlib.Path) -> Any:
    """Returns the `tokenizers.Tokenizer` in tokenizer.json, or one that transformers builds."""
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself, no subclass
            raise InputError(f"{path}: damaged tokenizer ({error})") from None
    if not [*folder.glob("*.model"), *folder.glob("vocab.*"), *folder.glob("merges.txt")]:
        raise InputError(f"{folder}: no tokenizer.json in the folder")
    import transformers  # several seconds

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.backend_tokenizer
    except Exception as error:  # each of its many converters raises its own kinds
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: no tokenizer that can be read ({reason})") from None


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Loads a folder's tokenizer, its chat template and the ids that end a text.

    All files but tokenizer.json, or those from which transformers makes it, may be missing.

    Raises:
      InputError: no tokenizer, or a damaged file.
    """
    settings = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(folder, settings)
    backend, wants_bos = _backend_of(folder), settings.get("add_bos_token")
    # Llama's class in transformers lets this setting overrule tokenizer.json.
    if wants_bos is not None and str(settings.get("tokenizer_class")).startswith("Llama"):
        add_bos(backend, special_tokens.get("bos_token"), bool(wants_bos))
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_ids=_eos_ids(folder),
        chat_template=_chat_template(folder, settings),
    )


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(TokenTexts):
    """Ids 0 to 255 are bytes; the others have no text and print as `<id>`.

    Random weights come with a shape but without a tokenizer; this one lets them take a prompt. See
    `Tokenizer` for the attributes and methods.
    """

    vocab_size: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template = None

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Returns the bytes of a text, after BOS, if any.

        Raises:
          InputError: invalid Unicode, or a byte beyond the vocabulary.
        """
        try:
            ids = list(text.encode("utf-8"))
        except UnicodeError:
            raise InputError("the text is not valid UTF-8") from None
        if ids and max(ids) >= self.vocab_size:
            raise InputError(f"byte {max(ids)} is beyond the vocabulary of {self.vocab_size}")
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def piece(self, token_id: int, is_first: bool) -> bytes:
        """See `TokenTexts`."""
        del is_first
        if token_id in (*self.eos_ids, self.bos_id):
            return b""
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Raises InputError: bytes have no chat template."""
        raise InputError("random weights have no chat template: give the prompt with --nochat")

    def vocabulary(self) -> dict[str, int]:
        """Returns every id under its own name."""
        return {f"<{token_id}>": token_id for token_id in range(self.vocab_size)}


TokenizerLike = Tokenizer | ByteTokenizer  # what the programs take
