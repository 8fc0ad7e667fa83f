"""Policies as text: ``sink:4096``, ``sink:4096:4``, ``turns:8k,keep_last_turns=3``.

text     = name { (":" | ",") argument }
argument = value | field "=" value          values without a name fill the fields in their order, and come first
value    = number | "true" | "false" | "none" | word | JSON string
number   = digits, "_" between them, "k" after them for 1024
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from agentkv.errors import InvalidRequest
from agentkv.policies.retention.contract import RETENTION, RetentionPolicy

__all__ = ["parse_policy", "policy_text"]

_PIECE = re.compile(r'(?:[^,:"]|"(?:[^"\\]|\\.)*")*')
_NUMBER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(k?)", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NAMED = re.compile(r"(\w+)\s*=\s*(.*)", re.DOTALL)
_RESERVED = {"none": None, "true": True, "false": False}


def parse_policy(value: str | RetentionPolicy) -> RetentionPolicy:
    """The policy that ``value`` describes. ``InvalidRequest`` says what is wrong with it and shows an example."""
    if isinstance(value, RetentionPolicy):
        return value
    if not isinstance(value, str):
        raise InvalidRequest(
            f"a policy is text such as 'sink:4096' or a RetentionPolicy, not {value!r}", param="policy"
        )
    name, *arguments = _split(value)
    policy = _policy(name)
    given: dict[str, Any] = {}
    hints, known = get_type_hints(policy), _fields(policy)
    order = iter([field.name for field in known.values() if not field.kw_only])
    named: re.Match[str] | None = None
    for argument in arguments:
        after, named = named, _NAMED.fullmatch(argument)
        if after and not named:
            raise _wrong(value, f"has {argument!r} after a named argument: name it too", policy)
        field = named[1] if named else next(order, None)
        if field is None or field not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no arguments"
            raise _wrong(value, f"has {argument!r} where {name} {takes}", policy)
        if field in given:
            raise _wrong(value, f"gives {field} twice", policy)
        given[field] = _read(named[2] if named else argument, hints[field], value, field, policy)
    missing = [field.name for field in known.values() if _required(field) and field.name not in given]
    if missing:
        raise _wrong(value, f"lacks {', '.join(missing)}", policy)
    try:
        return policy(**given)
    except InvalidRequest:
        raise
    except (TypeError, ValueError) as error:
        raise _wrong(value, f"was refused: {error}", policy) from error


def policy_text(policy: RetentionPolicy) -> str:
    """The canonical text of ``policy``, without what its defaults say: ``parse_policy(policy_text(p)) == p``.

    ``InvalidRequest`` for a policy that has no such text: not registered, or with fields of other types.
    """
    known = _fields(type(policy))
    given = {name: getattr(policy, name) for name in known}
    for name, field in known.items():
        fewer = {other: value for other, value in given.items() if other != name}
        if not _required(field) and _makes(type(policy), fewer, policy):
            given = fewer
    text = policy.name
    for name, value in given.items():
        plain = _required(known[name]) and not known[name].kw_only
        text += f":{_write(value)}" if plain else f"{',' if '=' in text or ':' in text else ':'}{name}={_write(value)}"
    if type(policy) is not _policy(policy.name) or parse_policy(text) != policy:
        raise InvalidRequest(
            f"{policy!r} cannot be written as text: a policy is a frozen dataclass registered as {policy.name!r}, with "
            "fields of type int, bool, str or None",
            param="policy",
        )
    return text


def _split(text: str) -> list[str]:
    """Name and arguments. Separators inside JSON strings are theirs."""
    pieces, at = [], 0
    while match := _PIECE.match(text, at):
        pieces.append(match[0].strip())
        at = match.end() + 1
        if match.end() == len(text):
            break
        if text[match.end()] == '"':
            raise InvalidRequest(f"policy {text!r} has a quotation mark that is not closed", param="policy")
    return pieces


def _policy(name: str) -> type[RetentionPolicy]:
    try:
        return RETENTION.get(name)
    except InvalidRequest:
        known = ", ".join(RETENTION)
        raise InvalidRequest(
            f"unknown retention policy {name!r}; known: {known}; for example sink:4096", param="policy"
        ) from None


def _fields(policy: type[RetentionPolicy]) -> dict[str, Field[Any]]:
    """What the constructor takes, in its order."""
    taken: list[Field[Any]] = [field for field in fields(policy) if field.init] if is_dataclass(policy) else []
    return {field.name: field for field in sorted(taken, key=lambda field: bool(field.kw_only))}


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _makes(policy: type[RetentionPolicy], given: Mapping[str, Any], same: RetentionPolicy) -> bool:
    """Whether these arguments make the ``same`` policy."""
    try:
        return policy(**given) == same
    except (TypeError, ValueError):
        return False


def _write(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not (_WORD.fullmatch(value) and value.lower() not in _RESERVED):
        return json.dumps(value)
    return str(value)


def _read(text: str, hint: Any, whole: str, field: str, policy: type[RetentionPolicy]) -> Any:
    """``text`` as one of the types that ``hint`` allows."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = {
        _write(value): value for choice in choices if get_origin(choice) is Literal for value in get_args(choice)
    }
    if text in literals:
        return literals[text]
    if text.lower() in _RESERVED and type(_RESERVED[text.lower()]) in choices:
        return _RESERVED[text.lower()]
    with suppress(ValueError):  # too many digits, or not JSON
        if int in choices and (number := _NUMBER.fullmatch(text)):
            return int(number[1]) * (1024 if number[2] else 1)
        if str in choices and text:
            return json.loads(text) if text.startswith('"') else text
    kinds = {int: "a number", bool: "true or false", str: "text", NoneType: "none"}
    allowed = [*literals, *(kinds[choice] for choice in choices if choice in kinds)]
    raise _wrong(whole, f"has {text!r} for {field}, which is {' or '.join(allowed) or 'not given as text'}", policy)


def _wrong(whole: str, what: str, policy: type[RetentionPolicy]) -> InvalidRequest:
    name = policy.name
    samples = {int: "4096", bool: "true", str: "text"}
    hints = get_type_hints(policy)
    required = [samples.get(hints[f.name], "…") for f in _fields(policy).values() if _required(f)]
    return InvalidRequest(f"policy {whole!r} {what}; for example {':'.join([name, *required])}", param="policy")
