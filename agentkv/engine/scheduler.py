"""Which jobs take part in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agentkv.engine.job import Job

__all__ = ["Scheduler"]


class Scheduler:
    """Decode before prefill; prefilling jobs take turns, a piece each.

    A piece is never cut to fit (see :class:`Job`): at least one goes into every step, further ones as long as the
    batch stays within ``max_batch_tokens``. Decoding jobs all take part: one row each.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._prefilling: deque[Job] = deque()
        self._decoding: list[Job] = []

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, job: Job) -> None:
        """A job that was begun."""
        (self._decoding if job.decoding else self._prefilling).append(job)

    def jobs(self) -> Sequence[Job]:
        """All jobs here."""
        return [*self._decoding, *self._prefilling]

    def remove(self, job: Job) -> None:
        """The job is finished, cancelled or failed."""
        if job in self._decoding:
            self._decoding.remove(job)
        elif job in self._prefilling:
            self._prefilling.remove(job)

    def plan(self) -> list[Job]:
        """The next step's jobs, each with its ``next_ids``. Mutates only whose turn it is."""
        batch = list(self._decoding)
        rows = len(batch)
        for _ in range(len(self._prefilling)):
            tokens = len(self._prefilling[0].next_ids())
            if rows > len(self._decoding) and rows + tokens > self.max_batch_tokens:
                break
            batch.append(self._prefilling[0])
            self._prefilling.rotate(-1)
            rows += tokens
        return batch

    def prefilled(self, job: Job) -> None:
        """The job's last piece is computed: it decodes from now on."""
        self._prefilling.remove(job)
        self._decoding.append(job)
