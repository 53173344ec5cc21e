"""Converts a model to an Orbax or Hugging Face folder, or PyTorch's .bin and .pt to safetensors.

python scripts/convert_weights.py --source=smollm2-135m-instruct --output=/path/to/new/folder
python scripts/convert_weights.py --source=HEAD/pytorch_model.bin --output=/path/to/new/folder
python scripts/convert_weights.py --source=HEAD --dtype=int8 --output=/path/to/new/folder
python scripts/convert_weights.py --source=HEAD --format=speculators --target=meta-llama/NAME \
  --output=/path/to/new/folder

The first command takes whatever --target of jspec.generate takes; the tokenizer is converted too.

The second is for weights in PyTorch's own format, such as published EAGLE-3 or Medusa heads: a
file, or the folder that holds it. The format is a pickle, which can run any program when it is
opened. It is read by torch's weights-only loader, which builds tensors and refuses everything else;
config.json and the tokenizer's files are copied.

The third writes a trained head in half the bytes, the fourth writes an EAGLE-3 head for vLLM.
"""

import pathlib

from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.new_files import check_new
from jspec.drafters.eagle_layouts import save_speculators
from jspec.drafters.head_folder import round_head
from jspec.weights import Tokenizer, load_model
from jspec.weights.torch_file import convert_torch, find_torch_files

_SOURCE = flags.DEFINE_string(
    "source", None, "What to convert: whatever --target of jspec.generate takes, or a .bin or .pt."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "The folder to write; it must not exist, or be empty."
)
_FORMAT = flags.DEFINE_enum(
    "format",
    None,
    ["orbax", "hf", "speculators"],
    "What to write: an Orbax folder (the default), a Hugging Face folder of safetensors (the only "
    "one for .bin and .pt), or vLLM's format of an EAGLE-3 head (speculators).",
)
_TARGET = flags.DEFINE_string("target", None, "For speculators: the target's name for vLLM.")
_NUM_DRAFT_TOKENS = flags.DEFINE_integer(
    "num_draft_tokens", 3, "For speculators: drafts per round."
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "bfloat16",
    ["bfloat16", "float32", "int8"],
    "Type of the weights; int8 is for heads only.",
)


def convert(*, source: str, output: pathlib.Path, format_name: str | None, dtype: str) -> None:
    """Loads a model and writes it in another format, to a folder that appears when it is complete.

    The source is a name that `load_model` takes, except random weights; or see `find_torch_files`.
    Without a format, "orbax" or "hf", the one that the source can be written in is chosen. The
    dtype "int8" is for a head's folder.

    Raises:
      InputError: no such model, or the folder exists or cannot be written.
    """
    check_new(output)
    if dtype == "int8":
        if format_name is not None:
            raise InputError(f"expected no --format with --dtype=int8, got {format_name}")
        round_head(pathlib.Path(source), output)
        return
    if files := find_torch_files(pathlib.Path(source)):
        if format_name == "orbax":
            raise InputError(f"{source}: PyTorch's files are converted with --format=hf")
        convert_torch(files, output, dtype)
        return
    if source.startswith("random:"):
        raise InputError(f"{source}: random weights come without a tokenizer; nothing to convert")
    if format_name != "hf":
        from jspec.weights.orbax_checkpoint import save_orbax as save
    else:
        from jspec.weights.hf import save_hf as save
    model = load_model(source, dtype=dtype, quantization="none")
    assert isinstance(model.tokenizer, Tokenizer)  # only random weights have another kind
    save(output, model.config, model.params, tokenizer=model.tokenizer)


def main() -> None:
    """Reads the flags and converts."""
    if not _SOURCE.value or not _OUTPUT.value:
        raise InputError("expected --source and --output")
    output = pathlib.Path(_OUTPUT.value)
    target = _TARGET.value
    if (_FORMAT.value == "speculators") != bool(target):
        raise InputError("expected --target with --format=speculators, and only there")
    if target:
        if _DTYPE.present:
            raise InputError(
                "expected no --dtype with --format=speculators: floats stay as they are"
            )
        save_speculators(
            pathlib.Path(_SOURCE.value),
            output,
            target=target,
            num_draft_tokens=_NUM_DRAFT_TOKENS.value,
        )
    else:
        convert(source=_SOURCE.value, output=output, format_name=_FORMAT.value, dtype=_DTYPE.value)
    print(f"wrote {_OUTPUT.value}")


if __name__ == "__main__":
    cli.run_main(main)
