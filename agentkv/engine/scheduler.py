"""Which jobs take part in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agentkv.engine.job import Job

__all__ = ["Scheduler"]


class Scheduler:
    """Decode before prefill; prefilling jobs take turns, a piece each.

    A step holds either one job's piece alone, or several jobs with at most ``joint_rows`` rows together. A piece is
    never cut to fit (see :class:`Job`). On a CPU ``joint_rows`` keeps bits independent of the load: bf16 products of 2
    to 32 rows were measured to agree bit for bit, while larger ones depend on how many rows they have (SmolLM2-135M,
    AMX). A large piece alone always has the rows that its own turn gives it.
    """

    def __init__(self, joint_rows: int) -> None:
        if joint_rows < 1:
            raise ValueError(f"a step needs at least one row, got joint_rows={joint_rows}")
        self.joint_rows = joint_rows
        self._prefilling: deque[Job] = deque()
        self._decoding: deque[Job] = deque()
        self._was_alone = False

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
        rows = min(len(self._decoding), self.joint_rows)
        piece = len(self._prefilling[0].next_ids()) if self._prefilling else 0
        if rows + piece > self.joint_rows and not (rows and self._was_alone):
            # A piece that does not fit beside the decodes alternates with them.
            self._was_alone = True
            return [_next(self._prefilling)]
        self._was_alone = False
        batch = [_next(self._decoding) for _ in range(rows)]
        for _ in range(len(self._prefilling)):
            tokens = len(self._prefilling[0].next_ids())
            if rows + tokens > self.joint_rows:
                break
            batch.append(_next(self._prefilling))
            rows += tokens
        return batch

    def prefilled(self, job: Job) -> None:
        """The job's last piece is computed: it decodes from now on."""
        self._prefilling.remove(job)
        self._decoding.append(job)


def _next(jobs: deque[Job]) -> Job:
    """The job whose turn it is; it goes to the end of the queue."""
    jobs.rotate(-1)
    return jobs[-1]
