"""The tokenizer of a Hugging Face folder."""

import pathlib
from typing import Any

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.weights.tokenizers.tokenizer import Tokenizer, add_bos

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


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
