"""Audits of encoder-decoders: what their requests read, and the whole audit."""

import numpy as np
import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.generator import Generator
from jspec.generation.logits_after import make_logits_after
from jspec.generation.request import SamplingParams
from jspec.lab.auditing import rows
from jspec.lab.auditing.checks import run_checks
from jspec.lab.auditing.distribution import flattened
from jspec.lab.auditing.rows import Rows, choose_context, jit_logits, make_request
from jspec.lab.auditing.subject import Subject
from jspec.weights.hf import load_hf
from jspec.weights.resolver import LoadedModel
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.models.encoder_decoder_checkpoints import VOCAB, make_checkpoint, oracle_logits

SETTINGS = SamplingParams(max_new_tokens=8, temperature=1.0)


whisper_alone = pytest.mark.parametrize("pair", ["whisper"], indirect=True)


@pytest.fixture(scope="module", params=["t5 1.1", "whisper"])
def pair(request, tmp_path_factory):
    """Returns a checkpoint's name, and the model as transformers and as jspec have it."""
    folder = tmp_path_factory.mktemp("model")
    oracle = make_checkpoint(request.param, folder)
    config, params = load_hf(folder, "float32")
    tokenizer = ByteTokenizer(VOCAB, eos_ids=config.eos_ids)
    return request.param, oracle, LoadedModel(config, params, tokenizer, "tiny", is_random=True)


def test_a_parting_is_judged_with_the_source(pair):
    """Audits in bfloat16 ended with a traceback where two answers part."""
    name, oracle, model = pair
    row = Generator(model, drafter="none").make_row(make_request(model, [7, 9, 4], SETTINGS))
    text = [*row.prompt, 11, 12]
    logits = make_logits_after(model)(text, row.source)
    source, length = row.source[None], np.array([len(row.source)])
    expected = oracle_logits(oracle, name, source, length, np.array([text]))[0, -1]
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@whisper_alone
def test_requests_for_a_model_that_hears_have_sounds_of_their_own(pair):
    """So that one row's sound in another row would be noticed."""
    first, second = (make_request(pair[2], prompt, SETTINGS).source for prompt in ([7, 9], [7, 8]))
    assert np.abs(first - second).max() > 1


@whisper_alone  # whose norms have a bias
def test_the_control_has_flatter_logits(pair):
    """A norm's bias was dropped, which made a different model and no control."""
    model, text = pair[2], np.array([[7, 9, 4]])
    run = jit_logits(model)
    logits = run(model.params, text)
    np.testing.assert_allclose(run(flattened(model.params), text), 0.7 * logits, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_the_whole_audit_passes(pair, rule):
    """With drafts of the model's own first layer; sampled, and greedy parity."""
    options = DrafterOptions(draft_layers=1)
    subject = Subject(pair[2], None, "layer_skip", 2, rule, SETTINGS, drafter_options=options)
    checks = list(run_checks(subject, num_rows=2048, max_new_tokens=8))
    assert len(checks) == 8
    assert [check.detail for check in checks if not check.has_passed] == []


@whisper_alone
def test_rows_are_few_where_sources_are_large(pair, monkeypatch):
    """Thousands of outputs of a real Whisper's encoder, in 128 rows, are gigabytes."""
    subject = Subject(pair[2], None, "prompt_lookup", 2, "rejection", SETTINGS)
    context = choose_context(pair[2], SETTINGS)
    assert Rows(subject, context, 1)._rows_per_run == 128
    config = pair[2].config
    of_one = 2 * 4 * config.num_layers * config.num_heads * config.encoder.max_len * config.head_dim
    monkeypatch.setattr(rows, "_SOURCE_BYTES", 3 * of_one + 100)
    assert Rows(subject, context, 1)._rows_per_run == 3
