"""Beam search: the best of several continuations by the sum of their tokens' log-probabilities.

    step      running beams            candidates of each       best of all        running beams
      t     [ h0  h1  h2  h3 ]  ─▶   likeliest tokens  ─▶   ends: finished    ─▶  [ h0' h1' h2' h3' ]
                                                            others: run on

A finished one scores sum / length ** penalty. The rules, ties included, are those of transformers' ``generate`` with
``num_beams``, which the tests compare it with. Pure: what computes log-probabilities is somebody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["BeamSearch", "Hypothesis", "Search"]

Candidates = Sequence[tuple[int, float]]
"""Of one beam: its likeliest next tokens with their natural-log probabilities, in any order."""


@dataclass(frozen=True, slots=True)
class Search:
    """What is asked for. ``early_stopping``: end with as many finished as there are beams, ``"never"``: only when no
    running one can become better at any length, ``False``: at its present length."""

    beams: int
    max_tokens: int
    end_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def candidates(self) -> int:
        """So many tokens of each beam are looked at: enough to go on with where the best ones all end."""
        return max(2, 1 + len(self.end_ids)) * self.beams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """``score``: the sum of log-probabilities while it runs, divided by the length's power once it has finished."""

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """One search. ``running``: the beams; give ``advance`` candidates of each until ``done``."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._hopeless = False
        self.running: list[Hypothesis] = [Hypothesis((), 0.0)]
        self.finished: list[Hypothesis] = []
        self.done = False

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """One token more. Returns of which beam before each beam now running is the continuation."""
        search = self._search
        length = len(self.running[0].tokens) + 1
        found = [
            (beam.score + logprob, parent, token)
            for parent, (beam, tokens) in enumerate(zip(self.running, candidates, strict=True))
            for token, logprob in tokens
        ]
        found.sort(key=lambda each: (-each[0], each[1], each[2]))
        best = found[: search.candidates]
        ends = [token in search.end_ids or length == search.max_tokens for _, _, token in best]
        full = len(self.finished) == search.beams
        if not self._hopeless and not (full and search.early_stopping is True):
            penalty = length**search.length_penalty
            self.finished += [
                Hypothesis((*self.running[parent].tokens, token), score / penalty)
                for (score, parent, token), end in zip(best[: search.beams], ends, strict=False)
                if end
            ]
            self.finished = sorted(self.finished, key=lambda each: -each.score)[: search.beams]
        going = [each for each, end in zip(best, ends, strict=True) if not end][: search.beams]
        parents = [parent for _, parent, _ in going]
        self.running = [Hypothesis((*self.running[parent].tokens, token), score) for score, parent, token in going]
        self.done = not going or self._over(length)
        return parents

    def _over(self, length: int) -> bool:
        search = self._search
        if len(self.finished) < search.beams:
            return False
        longest = search.max_tokens if search.early_stopping == "never" and search.length_penalty > 0 else length
        self._hopeless |= self.running[0].score / longest**search.length_penalty <= self.finished[-1].score
        return self._hopeless or search.early_stopping is True

    @property
    def best(self) -> Hypothesis:
        """The best that has finished; call once it is done."""
        return self.finished[0]
