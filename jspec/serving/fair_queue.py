"""Requests that wait for a slot, ordered by priority, by the share their key has had, by arrival.

Among the requests of the smallest `priority`, the key that has been served the fewest tokens
(prompts and answers together) goes first, with its oldest request. A key that comes anew,
or again, begins with the count of the least served key that is there: idle keys earn no credit
(arXiv 2401.00588). With one key the queue
is first come, first served.
"""

import math
from collections import Counter
from collections.abc import Callable

from jspec.serving.job import Job


class FairQueue:
    """The queue; see above."""

    def __init__(self) -> None:
        self._waiting: list[Job] = []  # in the order of their arrival
        self._present = Counter[str]()  # requests of each key, waiting or running
        self._served: dict[str, int] = {}  # tokens

    def __len__(self) -> int:
        """Returns how many requests wait."""
        return len(self._waiting)

    def add(self, job: Job) -> None:
        """Lets a request wait."""
        if not self._present[job.key]:
            # Where nobody is there, all begin again.
            least = min((self._served[key] for key in self._present), default=math.inf)
            # Whoever has had no more than that would begin with it anyway.
            self._served = {key: n for key, n in self._served.items()
                            if n > least or self._present[key]}  # fmt: skip
            self._served.setdefault(job.key, int(least) if self._present else 0)
        self._present[job.key] += 1
        self._waiting.append(job)

    def first(self) -> Job:
        """Returns the request whose turn it is, without removing it."""
        return min(self._waiting, key=lambda job: (job.priority, self._served[job.key]))

    def take(self, job: Job) -> None:
        """Removes a request, as it gets a slot."""
        self._waiting.remove(job)

    def put_back(self, job: Job) -> None:
        """Puts a request that was taken back, before all that came after it."""
        self._waiting.insert(0, job)

    def take_all(self, is_meant: Callable[[Job], bool] = lambda job: True) -> list[Job]:
        """Removes the requests that a test picks, and returns them in the order of arrival."""
        taken = [job for job in self._waiting if is_meant(job)]
        for job in taken:
            self._waiting.remove(job)
            self.end(job)
        return taken

    def charge(self, job: Job, num_tokens: int) -> None:
        """Counts tokens that a request which was taken has had."""
        self._served[job.key] += num_tokens

    def end(self, job: Job) -> None:
        """Forgets a request that waits no more, as its answer has ended."""
        self._present -= Counter([job.key])  # keys without any are left out
