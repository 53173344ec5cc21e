"""Clients that nobody here wrote, against a real server; and the soak."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.serving.served import TEMPLATE, Served, load_tiny
from tests.test_house import ROOT
from tests.tiny_models import save_folder

pytestmark = pytest.mark.slow

_JAVASCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2], apiKey: "none", maxRetries: 0});
const asked = {model: "tiny", messages: [{role: "user", content: "Hello?"}], max_tokens: 20,
               temperature: 0.9, seed: 5};
const whole = await client.chat.completions.create(asked);
let streamed = "";
for await (const chunk of await client.chat.completions.create({...asked, stream: true}))
  streamed += chunk.choices[0]?.delta?.content ?? "";
let refusal = null;
try {
  await client.chat.completions.create({...asked, temperature: 9});
} catch (error) {
  refusal = {status: error.status, param: error.param, name: error.constructor.name};
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
console.log(JSON.stringify({whole: whole.choices[0].message.content, streamed, refusal, models,
                            cached: whole.usage.prompt_tokens_details.cached_tokens}));
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(load_tiny(tmp_path_factory.mktemp("model")), max_queue=64) as server:
        yield server


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_javascript_client_gets_what_the_python_client_gets(served, tmp_path):
    """npm's openai: whole, streamed, an error as an exception of its kind, the list of models."""
    install = ["npm", "install", "--silent", "--no-fund", "--no-audit", "openai"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=300)
    (tmp_path / "client.mjs").write_text(_JAVASCRIPT)
    command = ["node", "client.mjs", f"http://127.0.0.1:{served.port}/v1"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    found = json.loads(done.stdout)
    body = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 20, "seed": 5,
            "temperature": 0.9}  # fmt: skip
    _, reply = served.post("/v1/chat/completions", body)
    text = reply["choices"][0]["message"]["content"]
    assert (found["whole"], found["streamed"]) == (text, text)
    assert found["refusal"] == {"status": 400, "param": "temperature", "name": "BadRequestError"}
    assert (found["models"], found["cached"]) == (["tiny"], 0)


def test_thousands_of_requests_from_the_schema_give_no_500(served, tmp_path):
    """schemathesis over /openapi.json; answers are as the schema says, whatever the status."""
    program = shutil.which("schemathesis", path=os.path.dirname(sys.executable))
    if program is None:
        pytest.skip("needs schemathesis")
    checks = "not_a_server_error,response_schema_conformance,content_type_conformance"
    command = [
        program, "run", f"http://127.0.0.1:{served.port}/openapi.json", "--workers=4",
        f"--checks={checks}", "--max-examples=2000", "--phases=coverage,fuzzing",
        "--generation-deterministic", "--suppress-health-check=all", "--request-timeout=60",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    counts = re.findall(r"(\d[\d,]*) generated", done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(counts[-1].replace(",", "")) >= 5000, done.stdout[-1000:]
    assert served.worker.error is None


def test_a_soak_finds_nothing(tmp_path):
    folder = save_folder(tmp_path / "tiny", template=TEMPLATE)
    command = [
        sys.executable, str(ROOT / "scripts/soak_server.py"), f"--target={folder}",
        "--seconds=60", "--kills=3", "--dtype=float32", "--drafter=prompt_lookup",
        "--prefix_cache_bytes=200000",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    figures = json.loads(done.stdout)
    assert (done.returncode, figures["problems"]) == (0, []), done.stderr[-2000:]
    assert figures["requests"] > 500
    assert figures["by_status"]["400"] > 0 < figures["by_status"]["left"]
