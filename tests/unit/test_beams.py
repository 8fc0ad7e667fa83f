"""The search alone: against every continuation there is, on small alphabets, and the rules that end it."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.engine.beams import BeamSearch, Hypothesis, Search

END = 0


def language(seed: int, vocab: int) -> dict[int | None, list[tuple[int, float]]]:
    """Log-probabilities of the next token by the last one."""
    draw = random.Random(seed)
    table: dict[int | None, list[tuple[int, float]]] = {}
    for last in (None, *range(vocab)):
        weights = [draw.random() + 1e-3 for _ in range(vocab)]
        table[last] = [(token, math.log(w / sum(weights))) for token, w in enumerate(weights)]
    return table


def run(search: Search, table: dict[int | None, list[tuple[int, float]]]) -> BeamSearch:
    found = BeamSearch(search)
    while not found.done:
        before = found.running
        parents = found.advance([table[beam.tokens[-1] if beam.tokens else None] for beam in before])
        for parent, beam in zip(parents, found.running, strict=True):
            assert beam.tokens[:-1] == before[parent].tokens
    return found


@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 4), st.sampled_from([0.0, 0.7, 1.0, 2.0]))
def test_with_a_beam_for_every_continuation_the_best_of_all_is_found(
    seed: int, vocab: int, length: int, penalty: float
) -> None:
    table = language(seed, vocab)
    found = run(Search(vocab**length, length, frozenset([END]), penalty, "never"), table)
    scores = {}
    for tokens in product(range(vocab), repeat=length):
        cut = next((i + 1 for i, token in enumerate(tokens) if token == END), length)
        chosen = tokens[:cut]
        total = sum(dict(table[last])[token] for last, token in zip((None, *chosen), chosen, strict=False))
        scores[chosen] = total / cut**penalty
    best = max(scores, key=lambda tokens: scores[tokens])
    assert found.best.score == pytest.approx(scores[best])


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_one_beam_is_greedy(seed: int, length: int) -> None:
    table = language(seed, 7)
    found = run(Search(1, length, frozenset([END]), early_stopping=True), table)
    last, greedy = None, []
    while len(greedy) < length and (not greedy or greedy[-1] != END):
        last = max(table[last], key=lambda each: each[1])[0]
        greedy.append(last)
    assert found.best.tokens == tuple(greedy)


def test_no_beam_ends_before_its_length_without_an_end_token() -> None:
    found = run(Search(3, 5, frozenset()), language(1, 6))
    assert [len(hypothesis.tokens) for hypothesis in found.finished] == [5, 5, 5]
    assert found.finished == sorted(found.finished, key=lambda each: -each.score)


def test_early_stopping_ends_with_as_many_answers_as_beams() -> None:
    table = {None: [(0, -0.1), (1, -3.0)], 0: [(0, -0.1), (1, -3.0)], 1: [(0, -0.1), (1, -3.0)]}
    soon = run(Search(2, 50, frozenset([END]), early_stopping=True), table)  # type: ignore[arg-type]
    assert len(soon.finished) == 2
    assert soon.best == Hypothesis((0,), -0.1)
