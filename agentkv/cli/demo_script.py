"""What the demo's agents are and say. The document is shipped with the package and was written for it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Agent", "agents"]

_QUICK_SECTIONS = 4


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent's conversation: ``messages`` before it sleeps, ``next_message`` after."""

    name: str
    system: str
    messages: tuple[str, ...]
    next_message: str


def _document(*, quick: bool) -> str:
    text = files("agentkv.cli").joinpath("data/expedition.txt").read_text(encoding="utf-8")
    return text[: text.index(f"\n{_QUICK_SECTIONS}. ")] if quick else text


def agents(*, quick: bool) -> tuple[Agent, ...]:
    """Three agents; ``quick`` gives them a shorter document and fewer turns."""
    everyone = (
        Agent(
            "bolt",
            "You are Bolt, a terse assistant. Answer in one short sentence.",
            (
                "What is the capital of France?",
                "And the capital of Italy?",
                "Which of the two lies further north?",
            ),
            "Which capital did I ask about first?",
        ),
        Agent(
            "gardener",
            "You are a patient gardener who explains things to beginners, step by step and in plain words.",
            (
                "I have a small balcony that faces south. What could I grow there?",
                "How often should I water tomatoes in pots in July?",
                "The lower leaves are turning yellow. What could be wrong?",
            ),
            "Please sum up your advice as three short steps.",
        ),
        Agent(
            "archivist",
            "You are an archivist. Answer questions about the document you are given, from the document alone.",
            (
                f"Here is a report.\n\n{_document(quick=quick)}\n\nWho led the wintering party?",
                "What was the name of the ship, and who was her master?",
                "What was the name of the lead dog?",
            ),
            "Who was the radio operator, and how old was she?",
        ),
    )
    if not quick:
        return everyone
    return tuple(Agent(a.name, a.system, a.messages[:2], a.next_message) for a in everyone)
