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
Recurrent layers (linear attention, state spaces, short convolutions) have no keys: each token overwrites what they
carry. It is carried and stored bit for bit, once for each resume point, and there is no way back from it but to such a
point: a fork or a rewind to another place begins at the last one before it and computes the rest. Nothing can be taken
out of it either, so the policy is `full`. Sessions of such a model are computed one after the other within a step.

Refused at load: ALiBi, encoder-decoder models, attention to other keys than those a layer stores (shared or compressed
KV), windows that only a mask knows, models without any attention (Mamba), and recurrent layers that start anew at each
row of several tokens (Jamba), or that keep their state in a cache of their own (MiniMax).
"""


def _attention(family: Family) -> str:
    kinds = ["full" if window is None else "sliding window" for window in family.windows]
    kinds = sorted(set(kinds))
    if family.states:
        kinds.append("recurrent" if "recurrent" in family.states else "short convolutions")
    return " and ".join(kinds)


def _positions(family: Family) -> str:
    if family.learned_positions:
        return "learned"
    text = "rotary, interleaved" if family.interleaved else "rotary"
    size = max(family.turns)
    if not size:
        return "none"
    if size < 8:
        text += ", part of each key"
    if 0 in family.turns and not family.states:
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
        f"| {f.name} | {_attention(f)} | {_positions(f)} | {_beside(f)} | {'yes' if f.movable else 'no'} |"
        for f in FAMILIES
    ]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
