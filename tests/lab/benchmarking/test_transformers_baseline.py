"""transformers beside jspec: the same answers, and target calls counted as they are."""

import dataclasses
import functools

import pytest

from jspec.common.timing import timed
from jspec.lab.benchmarking.baselines import TransformersModels
from tests.cases import slow_unless
from tests.tiny_models import CONFIG, draft, make_generator, make_model, shared_generator, target

torch = pytest.importorskip("torch")
PROMPTS = ([5, 9, 77, 9, 5, 9], list(b"abcabcabcabcab"), [3])
MAX_NEW_TOKENS = 23


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Others would only wait for each other, busily: the models are tiny."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.fixture(scope="module")
def beside():
    return TransformersModels(target(), draft())


def plain_of(beside):
    return beside.method("none", 0, MAX_NEW_TOKENS)


@pytest.fixture(scope="module")
def plain_answers(beside):
    return [plain_of(beside)(prompt, 0).token_ids for prompt in PROMPTS]


@pytest.fixture
def forward_calls(beside, monkeypatch):
    """Returns how many ids each forward of the target reads, told by the forward itself."""
    target_forward, calls = beside._target.forward, []

    def forward(*args, **options):
        calls.append(options["input_ids"].shape[1])
        return target_forward(*args, **options)

    monkeypatch.setattr(beside._target, "forward", forward)
    return calls


def test_plain_is_jspecs_plain_and_one_token_a_call(beside, plain_answers):
    """The first token is the prefill's on both sides; each other one takes a call."""
    generator = shared_generator("none")
    for prompt, answer in zip(PROMPTS, plain_answers, strict=True):
        ours = generator.generate(_request(prompt))
        assert answer == ours.token_ids
        counted = plain_of(beside)(prompt, 0)[1:3]
        assert counted == (len(answer) - 1, len(answer) - 1)
        assert counted == (ours.stats.num_round_tokens, ours.stats.num_rounds)


@pytest.mark.parametrize("num_draft_tokens", [slow_unless(False, 1), 4])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
def test_answers_are_plain_ones_and_calls_are_forwards(
    beside, plain_answers, forward_calls, drafter, num_draft_tokens
):
    """Guards against a count that is derived from something else than calls of the target."""
    method = beside.method(drafter, num_draft_tokens, MAX_NEW_TOKENS)
    for prompt, answer in zip(PROMPTS, plain_answers, strict=True):
        forward_calls.clear()
        generated = method(prompt, 0)
        assert generated.token_ids == answer
        assert generated.num_calls == len(forward_calls) - 1
        assert max(forward_calls[1:]) == num_draft_tokens + 1


def test_a_target_of_another_family_keeps_its_biases():
    """Guards against a Qwen2 that answers as a Llama without them."""
    config = dataclasses.replace(CONFIG, family="qwen2", qkv_bias=True)
    model = make_model(config, name="qwen2")
    answer = plain_of(TransformersModels(model))(PROMPTS[0], 0).token_ids
    ours = make_generator("none", model).generate(_request(PROMPTS[0]))
    assert answer == ours.token_ids


def test_decoding_counts_the_time_after_the_prompt(beside):
    """And the tokens that it gives, with and without drafts."""
    models = TransformersModels(target(), draft(), decoding=True)
    for drafter, number in (("none", 0), ("model", 4)):
        call = functools.partial(models.method(drafter, number, MAX_NEW_TOKENS), PROMPTS[0], 0)
        whole = beside.method(drafter, number, MAX_NEW_TOKENS)(PROMPTS[0], 0)
        seconds, timing = timed(call)
        assert timing.num_tokens == whole.num_round_tokens
        assert whole.seconds is None
        assert 0 < timing.seconds < seconds


def test_sampled_answers_follow_their_seed():
    method = TransformersModels(target(), temperature=1.0).method("none", 0, MAX_NEW_TOKENS)
    first, same, different = (method(PROMPTS[0], seed).token_ids for seed in (0, 0, 1))
    assert first == same != different


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler has some of its own
def test_the_compiled_step_answers_likewise(beside, plain_answers):
    """Its cache has one size for all prompts; calls are counted though no hook sees them."""
    method = beside.compiled_method(max(map(len, PROMPTS)) + MAX_NEW_TOKENS, MAX_NEW_TOKENS)
    for prompt, answer in zip(PROMPTS, plain_answers, strict=True):
        assert method(prompt, 0)[:3] == (answer, len(answer) - 1, len(answer) - 1)


def rounds_by_hand(make_draft, prompt, answer, num_draft_tokens):
    """Returns how many tokens each call gives: drafts that are right, and the target's token."""
    gives, done = [], 0
    while done < len(answer):
        width = min(num_draft_tokens, len(answer) - done - 1)
        drafts = []
        if width:
            drafts = make_draft(width)([*prompt, *answer[:done]], 0).token_ids
        num_right = 0
        while num_right < len(drafts) and drafts[num_right] == answer[done + num_right]:
            num_right += 1
        gives.append(num_right + 1)
        done += num_right + 1
    return gives


@pytest.mark.parametrize("num_draft_tokens", [slow_unless(False, 1), 4])
def test_counts_with_a_draft_model_are_those_of_a_round_by_round_replay(
    beside, plain_answers, num_draft_tokens
):
    """Guards against another number of drafts, or a threshold or schedule that changes it.

    The first call reads the prompt and checks drafts: neither it nor its tokens count.
    """
    models = TransformersModels(draft())
    of_draft = functools.partial(models.method, "none", 0)
    mean_gains = []
    for prompt, answer in zip(PROMPTS, plain_answers, strict=True):
        gives = rounds_by_hand(of_draft, prompt, answer, num_draft_tokens)
        method = beside.method("model", num_draft_tokens, MAX_NEW_TOKENS)
        counted = method(prompt, 0)[1:3]
        assert counted == (sum(gives[1:]), len(gives) - 1)
        mean_gains.append(sum(gives[1:]) / (len(gives) - 1))
    assert max(mean_gains) > 1.2  # some drafts are kept,
    assert min(mean_gains) < num_draft_tokens + 1  # and some are not


def _request(prompt):
    from jspec.generation.request import Request, SamplingParams

    return Request(prompt, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
