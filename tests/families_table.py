"""The table in ``docs/families.md``, from the parameters of the tests: run as ``python tests/families_table.py``."""

from __future__ import annotations

from pathlib import Path

from families import FAMILIES, Family

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parent.parent / "docs" / "families.md"

_HEAD = """# Model families

What the tests compare with transformers' own results, in float32, logits and greedy tokens, on tiny random models:
alone, in a batch of sessions in different phases, with the prefill split, and after suspend and resume. A model of
another family loads too where its attention goes through transformers' attention interface and nothing about it is in
the way; what cannot be right is refused when it is loaded, with one sentence that names it.

| family | attention | positions | beside | policies that evict |
|---|---|---|---|---|
"""

_TAIL = """
Refused at load: recurrent, convolution and linear-attention layers, ALiBi, encoder-decoder models, attention to other
keys than those a layer stores (shared or compressed KV), windows that only a mask knows.
"""


def _attention(family: Family) -> str:
    kinds = ["full" if window is None else "sliding window" for window in family.windows]
    return " and ".join(sorted(set(kinds)))


def _positions(family: Family) -> str:
    if family.learned_positions:
        return "learned"
    text = "rotary, interleaved" if family.interleaved else "rotary"
    size = max(family.turns)
    if size < 8:
        text += ", part of each key"
    if 0 in family.turns:
        text += ", none in some layers"
    return text


def _beside(family: Family) -> str:
    found = []
    if family.softcap:
        found.append("score caps")
    if family.sinks:
        found.append("learned sinks")
    if family.limit < 256:
        found.append("context up to the switch of its frequencies")
    return ", ".join(found)


def page() -> str:
    """The whole page."""
    rows = [
        f"| {f.name} | {_attention(f)} | {_positions(f)} | {_beside(f)} | {'no' if f.learned_positions else 'yes'} |"
        for f in FAMILIES
    ]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
