"""The environment chat templates are written for, with a clock that the caller sets.

Same as transformers': sandboxed, ``trim_blocks``, loop controls, ``tojson`` without HTML escapes, ``raise_exception``,
``strftime_now``, ``{% generation %}``. Ours because transformers reads the wall clock: a session's head would change
overnight. A test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentkv.errors import TemplateError

__all__ = ["CompiledTemplate"]

_PROVIDED = frozenset({"messages", "tools", "add_generation_prompt"})


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what assistants wrote, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Keep the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


@lru_cache(maxsize=32)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    environment = _environment()
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(names - _PROVIDED - environment.globals.keys())
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template cannot be compiled: {error}", param="model") from error


class CompiledTemplate:
    """A chat template and the values that stay the same for every rendering. Thread-safe."""

    def __init__(self, source: str, *, fixed: Mapping[str, Any], now: datetime) -> None:
        """``fixed``: special tokens and template arguments; ``now``: what ``strftime_now`` formats."""
        self._template, self.arguments = _compile(source)
        self._fixed = {**fixed, "strftime_now": now.strftime}

    arguments: frozenset[str]
    """Names that the template reads besides messages, tools and the generation flag."""

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, generation_prompt: bool
    ) -> str:
        """The text. Raises ``TemplateError`` with the template's own words."""
        try:
            return self._template.render(
                **self._fixed, messages=messages, tools=tools, add_generation_prompt=generation_prompt
            )
        except Exception as error:
            raise TemplateError(f"the chat template refused these messages: {error}", param="messages") from error
