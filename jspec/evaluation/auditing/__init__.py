"""The proof that a target, a drafter and a rule are lossless, on the machine at hand."""

from jspec.evaluation.auditing.check import Check
from jspec.evaluation.auditing.subject import Subject

__all__ = ["Check", "Subject"]
