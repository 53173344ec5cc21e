"""The logits processors in the order in which they are applied; temperature and filters follow."""

from jspec.sampling import bias, penalties, suppression
from jspec.sampling.processor import Processor

PROCESSORS: tuple[Processor, ...] = (
    bias.PROCESSOR,
    penalties.PROCESSOR,
    suppression.PROCESSOR,  # last, so that nothing can raise a forbidden token again
)
