"""What an output has to look like: a JSON Schema, a regular expression, or a grammar."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationError

from agentkv.errors import InvalidRequest
from agentkv.schemas.json_schema import read
from agentkv.schemas.narrowing import narrowed

__all__ = ["Constraint"]

_FORM = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    # Control characters have no other form, and no string is to have two.
    "json_allowed_escapes": 'nrbtf\\"',
}
"""One line, as ``json.dumps`` writes it: a model cannot lose itself in white space."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Made by one of its class methods. ``text`` is the schema, expression or grammar, as llguidance takes it.

    ``model``: the pydantic class that an output becomes. The text is no part of the ``repr``, so of no log.
    """

    kind: Literal["json", "regex", "lark"]
    text: str = field(repr=False)
    model: type[BaseModel] | None = field(default=None, repr=False)

    @classmethod
    def json(cls, schema: type[BaseModel] | Mapping[str, Any] | bool) -> Self:
        """JSON on one line that follows ``schema``: a pydantic class, or a JSON Schema (draft 2020-12).

        Raises ``Unsupported`` for a keyword that would have to be ignored, naming it and its place; ``InvalidRequest``
        for what is no schema. Outputs are a part of what the schema allows: see ``narrowing``.
        """
        model = schema if isinstance(schema, type) else None
        document = schema if model is None else _document(model)
        smaller = narrowed(read(document))
        if smaller is False:
            raise InvalidRequest("schema: # is false: no output follows it", param="schema")
        return cls("json", json.dumps({} if smaller is True else smaller, ensure_ascii=False), model)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that matches the whole of ``pattern`` (Rust's syntax: no look-around, no back-references)."""
        return cls("regex", _checked(pattern, "a regular expression"))

    @classmethod
    def grammar(cls, lark: str) -> Self:
        """Text of the context-free grammar ``lark``, in llguidance's dialect of Lark, from its rule ``start``.

        A rule for JSON inside it is what ``rule`` gives; special tokens are written as ``<|name|>``.
        """
        return cls("lark", _checked(lark, "a grammar"))

    @classmethod
    def rule(cls, schema: type[BaseModel] | Mapping[str, Any] | bool) -> str:
        """The right-hand side of a rule for JSON that follows ``schema``, to be written into a grammar."""
        return "%json " + json.dumps({**json.loads(cls.json(schema).text), "x-guidance": _FORM})

    @property
    def form(self) -> dict[str, Any]:
        """How JSON is written: options of llguidance's compiler."""
        return dict(_FORM)

    @property
    def digest(self) -> str:
        """Names the grammar that it compiles to."""
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode()).hexdigest()

    @property
    def param(self) -> str:
        """The parameter that errors name."""
        return "schema" if self.kind == "json" else "constraint"

    def parse(self, text: str) -> Any:
        """A whole output as an object: of the pydantic class, what JSON says, or the text itself.

        Raises ``ValueError``, with a sentence, where the class's own validators refuse it: no schema can say them.
        """
        if self.kind != "json":
            return text
        try:
            return json.loads(text) if self.model is None else self.model.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(str(step) for step in first["loc"])
            message = f"it follows the schema, but {error.title} refused {place or 'it'}: {first['msg']}"
            raise ValueError(message) from error
        except Exception as error:  # what a validator raises, and how deep or long Python's own reader goes
            raise ValueError(f"it could not be read: {type(error).__name__}") from error


def _document(model: type[Any]) -> dict[str, Any]:
    if not issubclass(model, BaseModel):
        raise InvalidRequest(
            f"schema: {model.__name__} is no pydantic class; pass a subclass of pydantic.BaseModel or a JSON Schema",
            param="schema",
        )
    try:
        return model.model_json_schema()
    except Exception as error:  # pydantic's own, and whatever a class's hooks raise
        raise InvalidRequest(f"schema: {model.__name__} has no JSON Schema: {error}", param="schema") from error


def _checked(text: object, what: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{what} is a string that is not empty, not {type(text).__name__}", param="constraint")
    return text
