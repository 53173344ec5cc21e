"""Subjects of the audit: the tiny models with one layer, since compiling takes longest."""

import dataclasses
import functools

from jspec.generation.request import SamplingParams
from jspec.lab.auditing.distribution import NUM_TOKENS
from jspec.lab.auditing.rows import Rows, choose_context
from jspec.lab.auditing.subject import Subject
from tests.tiny_models import CONFIG, make_model, peaked_params

_CONFIG = dataclasses.replace(CONFIG, num_layers=1)
_TEXTS = (b"why is the sky blue", b"1 2 3 4 1 2 3 4 1 2 3", b"a")
PROMPTS = [list(text) for text in _TEXTS]
SETTINGS = SamplingParams(temperature=1.2, top_p=0.99, repetition_penalty=1.1)


@functools.cache
def models():
    """Returns target and draft."""
    target = make_model(_CONFIG, params=peaked_params(_CONFIG))
    draft = make_model(_CONFIG, params=peaked_params(_CONFIG, disturbance=0.05), name="draft")
    return target, draft


def make_subject(rule="rejection", drafter="prompt_lookup", **changes):
    """Returns what is to be audited."""
    target, draft = models()
    options = {
        "target": target,
        "draft": draft if drafter == "model" else None,
        "drafter": drafter,
        "num_draft_tokens": 2,
        "acceptance": rule,
        "settings": SETTINGS,
    }
    return Subject(**(options | changes))


def make_rows(subject, **options):
    """Returns its compiled rounds."""
    return Rows(subject, choose_context(subject.target, subject.settings), NUM_TOKENS, **options)
