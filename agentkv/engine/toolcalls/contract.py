"""What reads tool calls out of generated text: formats, their parsers, and what these say.

A parser is fed text in pieces of any size. What it returns, put together, is what it was fed, character for character:
text to show, calls with the text they were written as, and markup around calls that is neither. How the text was cut
changes nothing but how text parts are cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentkv.registry import Registry

__all__ = ["TOOL_FORMATS", "CallPart", "Markup", "Part", "Schemas", "TextPart", "ToolFormat", "ToolParser"]

Schemas = Mapping[str, Mapping[str, Any]]
"""The tools that can be called: name to JSON schema of the parameters, empty where there is none."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the reply."""

    raw: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """One complete call of a known tool. ``raw``: as it was generated; ``id``: where the model gave one."""

    raw: str
    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Markup:
    """What stands around calls and is not shown: white space, brackets that close a list of them."""

    raw: str


Part = TextPart | CallPart | Markup


class ToolParser(ABC):
    """Incremental parser of one reply. Time is linear in the text. Nothing that is fed can make it raise.

    What may yet become a call is held back, and becomes text where it does not: malformed JSON, an unknown tool, a call
    that the end of the reply cut off.
    """

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """More generated text; the parts that are certain with it. Mutates."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """The reply ends here; what was held back. Call once; nothing is fed afterwards."""


class ToolFormat(ABC):
    """One way in which models write calls. Stateless."""

    name: ClassVar[str]
    forces: ClassVar[bool] = False
    """Whether outputs can be forced to be calls: whether ``forced`` gives a grammar."""

    @abstractmethod
    def markers(self, tokenizer: Any) -> Collection[str]:
        """Strings that the parser must see. Where the tokenizer has special tokens for them, these get text."""

    @abstractmethod
    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> ToolParser:
        """A parser for one reply. ``prompt``: the text that opened it, special tokens included."""

    def forced(self, tools: Schemas, tokenizer: Any, *, many: bool) -> str | None:
        """A grammar of outputs that are a call of one of ``tools``, or ``many``, and nothing else: the parser reads
        them so. ``None`` where this format has none. ``Unsupported`` for a schema that no grammar can follow."""
        return None


TOOL_FORMATS: Registry[ToolFormat] = Registry("tool_format")
"""Every known format by name."""
