"""Clients that nobody here wrote, against a real server; and the soak."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import openai
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
def served():
    with Served(load_tiny(), max_queue=64) as server:
        yield server


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_javascript_client_gets_what_the_python_client_gets(served, tmp_path):
    """npm's openai: whole, streamed, an error as an exception of its kind, the list of models."""
    install = ["npm", "install", "--silent", "--no-fund", "--no-audit", "openai"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=300)
    (tmp_path / "client.mjs").write_text(_JAVASCRIPT)
    command = ["node", "client.mjs", f"http://127.0.0.1:{served.port}/v1"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    printed = json.loads(done.stdout)
    body = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 20, "seed": 5,
            "temperature": 0.9}  # fmt: skip
    _, reply = served.post("/v1/chat/completions", body)
    text = reply["choices"][0]["message"]["content"]
    assert (printed["whole"], printed["streamed"]) == (text, text)
    assert printed["refusal"] == {"status": 400, "param": "temperature", "name": "BadRequestError"}
    assert (printed["models"], printed["cached"]) == (["tiny"], 0)


def test_a_client_that_was_sent_away_comes_again_in_time(monkeypatch):
    """OpenAI's clients retry by themselves, after the seconds that Retry-After names."""
    moments, long = [], {"prompt": "abc", "max_tokens": 180, "min_tokens": 180}
    with Served(load_tiny(), max_queue=1) as server:
        server.gate.clear()
        others = [server.open("/v1/completions", long) for _ in range(4)]
        server.wait_until(lambda: server.scheduler.num_running + server.scheduler.num_waiting == 4)
        submit = server.scheduler.submit

        def watched(jobs):
            moments.append(time.monotonic())
            try:
                submit(jobs)
            finally:
                server.gate.set()  # room comes while the client waits

        monkeypatch.setattr(server.scheduler, "submit", watched)
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=3) as client:
            reply = client.completions.create(model="tiny", prompt="a", max_tokens=2)
        assert reply.usage.completion_tokens == 2
        assert len(moments) == 2, "one refusal, one retry"
        assert moments[1] - moments[0] >= 0.9
        for connection in others:
            assert connection.getresponse().status == 200
            connection.close()


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


_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
"""
_CHOICE = """doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]"""
_WORDS = """generation_kwargs: {until: ["z"], max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]"""


def test_lm_evaluation_harness_scores_as_on_transformers(tmp_path):
    """Log-likelihoods and generation, each sample; JSPEC_LM_EVAL names the program."""
    program = os.environ.get("JSPEC_LM_EVAL") or shutil.which("lm_eval")
    if program is None:
        pytest.skip("needs lm-eval[api,hf]")
    samples = [{"question": f"one two {n} ", "choices": [f"thr{n}", "ee", "x" * n], "answer": n % 3}
               for n in range(1, 9)]  # fmt: skip
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for name, kind, rest in (("tiny_choice", "multiple_choice", _CHOICE),
                             ("tiny_words", "generate_until", _WORDS)):  # fmt: skip
        task = _TASK.format(name=name, kind=kind, rest=rest, data=data)
        (tmp_path / f"{name}.yaml").write_text(task)
    lines_of = {}
    folder = save_folder(tmp_path / "tiny", template=TEMPLATE)
    with Served(load_tiny(), max_queue=64) as server:
        models = {
            "hf": f"pretrained={folder},dtype=float32",
            "local-completions": f"model=tiny,base_url=http://127.0.0.1:{server.port}/v1/completions,"
            f"num_concurrent=3,max_length=199,tokenizer={folder},tokenizer_backend=huggingface",
        }
        for model, options in models.items():
            command = [
                program, "--model", model, "--model_args", options, "--device", "cpu",
                "--tasks", "tiny_choice,tiny_words", "--include_path", str(tmp_path),
                "--output_path", str(tmp_path / model), "--log_samples",
            ]  # fmt: skip
            offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
            done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr[-3000:]
            lines = [json.loads(line) for name in ("tiny_choice", "tiny_words")
                     for path in (tmp_path / model).rglob(f"samples_{name}_*.jsonl")
                     for line in path.read_text().splitlines()]  # fmt: skip
            lines_of[model] = sorted(lines, key=lambda sample: ("acc" in sample, sample["doc_id"]))
    assert len(lines_of["hf"]) == 2 * len(samples)
    for sample, served_sample in zip(lines_of["hf"], lines_of["local-completions"], strict=True):
        if "acc" not in sample:
            assert sample["resps"] == served_sample["resps"], "the same text"
            continue
        assert sample["acc"] == served_sample["acc"]
        for mine, theirs in zip(
            served_sample["filtered_resps"], sample["filtered_resps"], strict=True
        ):
            assert float(mine[0]) == pytest.approx(float(theirs[0]), abs=2e-3)
            assert str(mine[1]) == str(theirs[1]), "whether it is what greedy decoding says"


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
