"""Tells when programs are compiled anew, and for what; those that the cache holds are not."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from jspec.common.timing import compile_clock
from jspec.common.user_cache import compile_listeners
from jspec.sampling.settings import Switches

_LARGE = "jit_prefill_chunk", "jit_run_rounds"  # the others take next to no time
_LONG = "long prompts"


class CompileNotice:
    """One line for each set of things that programs are compiled for.

    Attributes:
      is_silent: whether nobody is told.
    """

    def __init__(self, tell: Callable[[str], object] | None) -> None:
        """`tell` is called with the line; None says nothing."""
        self._tell, self.is_silent = tell, tell is None
        self._known, self._told = set[str](), set[frozenset[str]]()
        self._seconds = 0.0  # that the last set has taken

    @contextlib.contextmanager
    def around(self, parts: Sequence[str], *, is_long: bool = False) -> Iterator[None]:
        """Tells of the first program that is compiled within.

        Args:
          parts: what it is compiled for; those that are new are named.
          is_long: whether it reads a long prompt.
        """
        if self._tell is None:
            yield
            return
        found = frozenset([*parts, _LONG] if is_long else parts)

        def listen(program: str) -> None:
            if program.startswith(_LARGE) and not self._is_told(found):
                self._say([part for part in (*parts, _LONG) if part in found])
                self._told.add(found)

        compile_listeners.append(listen)
        begin = compile_clock().seconds
        try:
            yield
        finally:
            compile_listeners.remove(listen)
            self._known |= found
            if self._is_told(found):
                self._seconds += compile_clock().seconds - begin

    def _is_told(self, found: frozenset[str]) -> bool:
        return any(found <= told for told in self._told)  # rounds after a long prompt are no news

    def _say(self, parts: Sequence[str]) -> None:
        new = [part for part in parts if part not in self._known]
        is_new = "new " if new and self._known else ""  # what is known may be new together
        # As long as the last time: what is compiled is much alike.
        about = f": about {self._seconds:.0f} s" if self._seconds else ""
        assert self._tell is not None
        self._tell(f"compiling once for {is_new}{', '.join(new or parts)}{about}")
        self._seconds = 0.0


def describe_switches(switches: Switches) -> list[str]:
    """Returns what is switched on, as people call it."""
    filters = [name for name in ("top_k", "top_p", "min_p") if getattr(switches, name)]
    processors = [processor.name for processor in switches.processors]
    found = {"filters": filters, "processors": processors}
    parts = [f"{title} ({', '.join(names)})" for title, names in found.items() if names]
    return parts + ["log-probabilities"] * switches.logprobs
