"""The audit: checks that a target, a drafter and a rule are lossless, on the machine it runs on."""

from jspec.evaluation.auditing.subject import Check, Subject

__all__ = ["Check", "Subject"]
