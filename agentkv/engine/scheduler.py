"""Which jobs take part in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agentkv.engine.job import Job

__all__ = ["Scheduler"]


class Scheduler:
    """Decode before prefill; of the prefilling jobs the one that is nearest to its first token, a piece at a time.

    No job is passed over more often than there are other jobs here, as if they took turns: where the nearest would make
    another wait longer, the one that has waited longest goes instead. The shortest remaining first has the lowest mean
    (Schrage 1968).

    A step holds either one job's piece alone, or several jobs with at most ``joint_rows`` rows together. A piece is
    never cut to fit (see :class:`Job`). On a CPU ``joint_rows`` keeps bits independent of the load: bf16 products of 2
    to 32 rows were measured to agree bit for bit, while larger ones depend on how many rows they have (SmolLM2-135M,
    AMX). A large piece alone always has the rows that its own turn gives it.
    """

    def __init__(self, joint_rows: int) -> None:
        if joint_rows < 1:
            raise ValueError(f"a step needs at least one row, got joint_rows={joint_rows}")
        self.joint_rows = joint_rows
        self._prefilling: list[Job] = []
        """The one that was served longest ago first."""
        self._passed: dict[Job, int] = {}
        """Pieces of others since its own last one."""
        self._decoding: deque[Job] = deque()
        self._was_alone = False

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, job: Job) -> None:
        """A job that was begun."""
        if job.decoding:
            self._decoding.append(job)
        else:
            self._prefilling.append(job)
            self._passed[job] = 0

    def jobs(self) -> Sequence[Job]:
        """All jobs here."""
        return [*self._decoding, *self._prefilling]

    def remove(self, job: Job) -> None:
        """The job is finished, cancelled or failed."""
        if job in self._decoding:
            self._decoding.remove(job)
        elif job in self._passed:
            self._forget(job)

    def plan(self) -> list[Job]:
        """The next step's jobs, each with its ``next_ids``. Mutates only whose turn it is."""
        rows = min(len(self._decoding), self.joint_rows)
        waiting = list(self._prefilling)
        job = self._nearest(waiting)
        if job is not None and rows + len(job.next_ids()) > self.joint_rows and not (rows and self._was_alone):
            # A piece that does not fit beside the decodes alternates with them.
            self._was_alone = True
            self._serve(job)
            return [job]
        self._was_alone = False
        batch = [_next(self._decoding) for _ in range(rows)]
        while job is not None and rows + (tokens := len(job.next_ids())) <= self.joint_rows:
            batch.append(job)
            rows += tokens
            self._serve(job)
            waiting.remove(job)
            job = self._nearest(waiting)
        return batch

    def _nearest(self, waiting: Sequence[Job]) -> Job | None:
        """Of ``waiting``, the longest first, the one with the fewest pieces left, if the others can all be served in
        time after it; else the first."""
        if not waiting:
            return None
        nearest = min(waiting, key=lambda job: len(job.pieces))
        others = (job for job in waiting if job is not nearest)
        in_time = all(self._passed[job] + place < len(self) for place, job in enumerate(others, 1))
        return nearest if in_time else waiting[0]

    def _serve(self, job: Job) -> None:
        """A piece of it is computed now; it goes to the end of the line."""
        self._prefilling.remove(job)
        for other in self._prefilling:
            self._passed[other] += 1
        self._prefilling.append(job)
        self._passed[job] = 0

    def _forget(self, job: Job) -> None:
        self._prefilling.remove(job)
        del self._passed[job]

    def prefilled(self, job: Job) -> None:
        """The job's last piece is computed: it decodes from now on."""
        self._forget(job)
        self._decoding.append(job)


def _next(jobs: deque[Job]) -> Job:
    """The job whose turn it is; it goes to the end of the queue."""
    jobs.rotate(-1)
    return jobs[-1]
