"""Converts a model to an Orbax or a Hugging Face folder, tokenizer included.

python scripts/convert_weights.py --source=smollm2-135m-instruct --output=/path/to/new/folder
"""

import pathlib

from absl import flags

from jspec import cli
from jspec.errors import InputError
from jspec.weights import Tokenizer, load_model
from jspec.weights.new_folder import check_new

_SOURCE = flags.DEFINE_string(
    "source", None, "What to convert: whatever --target of jspec.generate takes."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "The folder to write; it must not exist, or be empty."
)
_FORMAT = flags.DEFINE_enum("format", "orbax", ["orbax", "hf"], "Orbax, or safetensors.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of every parameter.")


def convert(*, source: str, output: pathlib.Path, format_name: str, dtype: str) -> None:
    """Loads a model and writes it in another format.

    Args:
      source: a name that `load_model` takes; not random weights.
      output: the folder, which appears when it is complete.
      format_name: "orbax" or "hf".
      dtype: "bfloat16" or "float32".

    Raises:
      InputError: no such model, or the folder exists or cannot be written.
    """
    check_new(output)
    if source.startswith("random:"):
        raise InputError(f"{source}: random weights come without a tokenizer; nothing to convert")
    if format_name == "orbax":
        from jspec.weights.orbax_checkpoint import save_orbax as save
    else:
        from jspec.weights.hf import save_hf as save
    model = load_model(source, dtype=dtype)
    assert isinstance(model.tokenizer, Tokenizer)  # only random weights have another kind
    save(output, model.config, model.params, tokenizer=model.tokenizer)


def main() -> None:
    """Reads the flags and converts."""
    if not _SOURCE.value or not _OUTPUT.value:
        raise InputError("expected --source and --output")
    convert(
        source=_SOURCE.value,
        output=pathlib.Path(_OUTPUT.value),
        format_name=_FORMAT.value,
        dtype=_DTYPE.value,
    )
    print(f"wrote {_OUTPUT.value}")


if __name__ == "__main__":
    cli.run_main(main)
