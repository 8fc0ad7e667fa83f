"""Texts that calibration and benchmarks feed to models: real, long, the same on every machine."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any

from blake3 import blake3

from agentkv.engine.encode import Encoder
from agentkv.errors import InvalidRequest

__all__ = ["Text", "documentation", "encoded", "fitted_texts", "scored_text"]

_SHIPPED = Path(__file__).parent / "data" / "calibration.txt"
# fmt: off
_DOCUMENTED = (
    "argparse", "asyncio", "collections", "csv", "datetime", "decimal", "difflib", "email.message", "fractions",
    "functools", "heapq", "http.client", "inspect", "itertools", "json", "logging", "multiprocessing", "operator",
    "optparse", "os", "pathlib", "pickle", "pickletools", "random", "re", "sched", "shutil", "smtplib", "socket",
    "sqlite3", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit",
    "turtle", "typing", "unittest.case", "unittest.mock", "urllib.request", "uuid", "xml.dom.minidom", "zipfile",
)
# fmt: on
_READ = ("textwrap", "statistics", "heapq", "csv")


@dataclass(frozen=True, slots=True)
class Text:
    """``source`` says where it is from, for a report."""

    source: str
    content: str

    @property
    def digest(self) -> str:
        """blake3 of its UTF-8 bytes."""
        return blake3(self.content.encode()).hexdigest()


def scored_text(file: Path | None = None) -> Text:
    """What calibration scores: the shipped text (prose, talk, code, tool output, logs, tables), or ``file``.

    ``InvalidRequest`` for a file that cannot be read as UTF-8.
    """
    path = file or _SHIPPED
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the text {path} cannot be read as UTF-8: {error}", param="text") from error
    return Text("shipped" if file is None else path.name, content)


@cache
def documentation() -> Text:
    """About 100,000 tokens of English and code: Python's reference, which it ships as ``pydoc_data.topics``.

    Some distributions leave that out; then the docstrings of its standard library.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return Text(f"docstrings of Python {sys.version_info.major}.{sys.version_info.minor}", _docstrings())
    return Text(f"reference of Python {sys.version_info.major}.{sys.version_info.minor}", "\n\n".join(topics.values()))


@cache
def fitted_texts() -> tuple[Text, ...]:
    """What codecs are fitted on: Python's reference, its docstrings, its source, a table of its own as JSON.

    Prose, code and data, as agents see them, in every Python, and never part of what is scored. Against the reference
    alone a basis fitted to these is 4 % smaller on SmolLM2 at a little less KL.
    """
    table = [{"code": s.value, "name": s.name, "phrase": s.phrase, "text": s.description} for s in HTTPStatus]
    source = "\n".join(filter(None, map(_source_of, _READ)))
    texts = [documentation(), Text("docstrings", _docstrings()), Text("source", source)]
    return (*texts, Text("JSON", json.dumps(table, indent=2)))


def encoded(text: Text, tokenizer: Any, tokens: int | None = None) -> list[int]:
    """Its first ``tokens`` ids (``None``: all), control tokens in it as plain text, nothing added in front.

    ``InvalidRequest`` without a tokenizer, or where the text has fewer.
    """
    if tokenizer is None:
        raise InvalidRequest("the model has no tokenizer, so that no text can be fed to it", param="model")
    encoder = Encoder(tokenizer)
    ids = encoder.encode(encoder.guard(text.content)).ids
    if tokens is not None and len(ids) < tokens:
        raise InvalidRequest(f"the text ({text.source}) has {len(ids):,} tokens, {tokens:,} are wanted", param="tokens")
    return ids[:tokens]


def _docstrings() -> str:
    with warnings.catch_warnings():
        # Looking at a module's members touches what it deprecates.
        warnings.simplefilter("ignore")
        return "\n\n".join(doc for name in _DOCUMENTED for doc in _docs_of(name))


def _source_of(name: str) -> str:
    """Empty where Python comes without its sources."""
    try:
        return inspect.getsource(import_module(name))
    except (ImportError, OSError):
        return ""


def _docs_of(name: str) -> Sequence[str]:
    """The module's own docstring, those of its functions and classes, and of their methods, in order of name."""
    try:
        module = import_module(name)
    except ImportError:
        return ()
    found = {inspect.getdoc(module): None}
    for _, thing in inspect.getmembers(module, lambda it: getattr(it, "__module__", None) == name):
        found[inspect.getdoc(thing)] = None
        if inspect.isclass(thing):
            found |= dict.fromkeys(inspect.getdoc(method) for _, method in inspect.getmembers(thing, inspect.isroutine))
    return [doc for doc in found if doc]
