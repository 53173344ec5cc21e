"""The tokenizer of a Hugging Face folder."""

import json
import pathlib
from typing import Any

from jspec.common.errors import InputError
from jspec.weights.tokenizers.tokenizer import Tokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an absent file is an empty one.

    Raises:
      InputError: unreadable, no JSON, or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: damaged JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def check_readable(path: pathlib.Path) -> None:
    """Checks that a file can be opened, for libraries that call every other one missing.

    Raises:
      InputError: it cannot; with what the system says.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _special_tokens(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens by name; they are strings or `{"content": string}`."""
    merged = read_json(folder / "special_tokens_map.json") | settings
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = merged.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
    """Returns the default chat template: a file of its own comes first."""
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


def _set_bos(backend: Any, settings: dict[str, Any], bos_token: str | None) -> None:
    """Lets `add_bos_token` overrule tokenizer.json, as transformers does for Llama's class."""
    from tokenizers import processors

    add_bos = settings.get("add_bos_token")
    if add_bos is None or not str(settings.get("tokenizer_class")).startswith("Llama"):
        return
    if bos_token is None or backend.token_to_id(bos_token) is None:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[bos_token, "$A"] if add_bos else ["$A"],
        special_tokens=[(bos_token, backend.token_to_id(bos_token))],
    )


def _through_transformers(folder: pathlib.Path) -> Any:
    """Returns the backend that transformers builds where there is no tokenizer.json."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.backend_tokenizer
    except Exception as error:  # of the many converters behind it, each raises its own kinds
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: no tokenizer that can be read ({reason})") from None


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Loads the tokenizer, its chat template and the ids that end a text.

    Args:
      folder: holds tokenizer.json (or what transformers makes one from), and where there are any
        tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and
        chat_template.jinja.

    Raises:
      InputError: no tokenizer, or a damaged file.
    """
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    settings = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(folder, settings)
    if path.is_file():
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself, no subclass
            raise InputError(f"{path}: damaged tokenizer ({error})") from None
    else:
        known = [*folder.glob("*.model"), *folder.glob("vocab.*"), *folder.glob("merges.txt")]
        if not known:
            raise InputError(f"{folder}: no tokenizer.json in the folder")
        backend = _through_transformers(folder)
    _set_bos(backend, settings, special_tokens.get("bos_token"))
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_ids=_eos_ids(folder),
        chat_template=_chat_template(folder, settings),
    )
