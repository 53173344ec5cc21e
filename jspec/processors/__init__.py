"""Logits processors, in the order in which they are applied; then come temperature and filters."""

from jspec.processors import bias, penalties, suppression
from jspec.processors.types import Processor, ProcessorState

PROCESSORS: tuple[Processor, ...] = (
    bias.PROCESSOR,
    penalties.PROCESSOR,
    suppression.PROCESSOR,
)

__all__ = ["PROCESSORS", "Processor", "ProcessorState"]
