"""Programs that measure, on a mesh of 8 virtual devices: what they count is that of one device.

Benchmarks and experiments on a mesh are in test_processes.py.
"""

import json
import os

import pytest

from tests.meshes import run_on_devices
from tests.programs import environment, run, write_lines
from tests.serving.served import TEMPLATE
from tests.tiny_models import save_folder

MESHES = [(), ("data:2,model:4",)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of a tiny target."""
    path = tmp_path_factory.mktemp("model") / "m"
    # Each of four devices has whole groups of 32 inputs.
    return save_folder(path, template=TEMPLATE, num_heads=8, head_dim=16, hidden_dim=128)


@pytest.fixture
def on_devices(compile_cache, tmp_path):
    """Returns a function that runs a program and reads what it writes; prompts, and a folder."""
    env = environment(compile_cache, tmp_path / "home") | {"JAX_PLATFORMS": "cpu"}
    flag = "--xla_force_host_platform_device_count=8"
    env["XLA_FLAGS"] = f"{flag} {os.environ.get('XLA_FLAGS', '')}"
    lines = [{"prompt": f"text {i}"} for i in range(4)]
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)

    def run_it(module, path, *flags):
        status, _, errors = run(module, *flags, env=env, timeout=300)
        assert status == 0, errors
        return path.read_text()

    return run_it, prompts, tmp_path


@pytest.mark.slow
def test_a_comparison_on_a_mesh(on_devices, folder):
    """The same drafts are accepted, and each row says on which devices."""
    run_it, prompts, home = on_devices
    outputs = []
    for mesh in MESHES:
        path = home / f"compared{len(mesh)}.jsonl"
        outputs.append(run_it(
            "jspec.generate", path, f"--target={folder}", f"--prompts_file={prompts}",
            "--compare=none,prompt_lookup", "--dtype=float32", "--max_new_tokens=16",
            f"--output_json={path}", *(f"--mesh={text}" for text in mesh),
        ))  # fmt: skip
    outputs = [[json.loads(line) for line in text.splitlines()] for text in outputs]
    counts = [[record["acceptance_rate"] for record in records] for records in outputs]
    assert counts[0] == counts[1]
    assert counts[0][1] > 0
    assert [record["settings"]["mesh"] for record in outputs[1]] == [{"data": 2, "model": 4}] * 2


@pytest.mark.slow
def test_logits_that_excuse_an_answer_on_a_mesh(tmp_path):
    """Guards against integers read in the order of one device: on a mesh shard follows shard."""
    path = save_folder(tmp_path / "m", num_layers=1, num_heads=8, head_dim=16, hidden_dim=128)
    differences = run_on_devices(f"""
from jspec.generation.logits_after import make_logits_after
from jspec.models.sharding import make_mesh
from jspec.weights import load_model
outputs = []
for kind in "none", "int8", "int4":
    models = [load_model({str(path)!r}, dtype="float32", quantization=kind, mesh=mesh)
              for mesh in (None, make_mesh("data:2,model:4"))]
    left, right = (make_logits_after(model)([5, 6, 7]) for model in models)
    outputs.append([float(abs(left - right).max()), float(abs(left).max())])
report(outputs)
""")
    for difference, largest in differences:
        assert difference < 1e-5 * largest


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_audit_on_a_mesh(on_devices, folder, quantization):
    """Every check passes there, with a draft model that is split, too, and with rounded weights."""
    run_it, _, home = on_devices
    path = home / "audit.json"
    draft = "--drafter=model", f"--draft={folder}"
    if quantization is not None:
        draft = "--drafter=prompt_lookup", f"--target_quantization={quantization}"
    text = run_it(
        "jspec.audit", path, f"--target={folder}", *draft, "--mesh=data:2,model:4",
        "--num_rows=1024", "--max_new_tokens=8", "--num_draft_tokens=2", "--temperature=1.2",
        f"--output_json={path}",
    )  # fmt: skip
    record = json.loads(text)
    assert record["is_lossless"]
    assert "'model': 4" in record["subject"]
