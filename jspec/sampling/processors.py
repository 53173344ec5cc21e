"""Logits processors, in the order in which they are applied; then come temperature and filters."""

from jspec.sampling import bias, penalties, suppression
from jspec.sampling.processor import Processor, ProcessorState

PROCESSORS: tuple[Processor, ...] = (
    bias.PROCESSOR,
    penalties.PROCESSOR,
    suppression.PROCESSOR,
)

__all__ = ["PROCESSORS", "Processor", "ProcessorState"]
