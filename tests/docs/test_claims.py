"""Names that README and docs speak of are there: commands, options, variables, metrics, entry points, formats."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented.blocks import ROOT, blocks_of, commands_of, pages
from typer.main import get_command

from agentkv import AgentKV, Session
from agentkv.api.settings import ServerSettings
from agentkv.cli.main import app
from agentkv.client import AsyncAgentKV, RemoteSession, RemoteSessions
from agentkv.codecs import CODECS
from agentkv.engine.toolcalls.contract import TOOL_FORMATS
from agentkv.kv import LAYOUTS
from agentkv.policies.residency import RESIDENCY
from agentkv.policies.retention import RETENTION
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.db.schema import REVISIONS
from agentkv.sessions.manager import Sessions
from agentkv.settings import Settings
from agentkv.storage.chunkheader import FORMAT
from agentkv.storage.opening import BLOBS

PAGES = [path.relative_to(ROOT).as_posix() for path in pages()]
VARIABLES = {
    *(f"AGENTKV_{name.upper()}" for name in Settings.model_fields),
    *(f"AGENTKV_SERVER_{name.upper()}" for name in ServerSettings.model_fields),
    *("AGENTKV_CONFIG", "AGENTKV_API_KEY", "AGENTKV_TEST_SEED"),
}
WHOLE = get_command(app)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def commands(path: Path) -> Iterator[str]:
    """All that begin with ``agentkv``, in blocks and in running text."""
    for block in blocks_of(path):
        if block.language in ("console", "bash", "sh"):
            for command in commands_of(block):
                yield from re.findall(r"(?:^|\s)(agentkv [^>|;&]*)", command)
    yield from re.findall(r"`(agentkv [a-z][^`]*)`", path.read_text())


def fault_of(command: str) -> str | None:
    """What of it this command line does not have."""
    words = shlex.split(command, comments=True)[1:]
    found: Any = WHOLE
    while words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    known = {"--help", *(option for each in found.params for option in (*each.opts, *each.secondary_opts))}
    if words and getattr(found, "commands", None):
        return f"`{words[0]}` is no command of `{found.name}`"
    return next((f"{word} is no option" for word in words if word.startswith("-") and word not in known), None)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_that_is_spoken_of_is_one(name: str) -> None:
    assert not [(command, fault) for command in commands(ROOT / name) if (fault := fault_of(command))]


def test_a_command_that_is_none_is_found() -> None:
    assert fault_of("agentkv store burn") and fault_of("agentkv chat --fast") and not fault_of("agentkv doctor --fast")


@pytest.mark.parametrize("name", PAGES)
def test_every_variable_that_is_spoken_of_is_read(name: str) -> None:
    assert set(re.findall(r"\bAGENTKV_[A-Z][A-Z_]*[A-Z]\b", text_of(name))) <= VARIABLES | {"AGENTKV_SERVER"}


def test_every_metric_that_is_spoken_of_is_exported() -> None:
    source = (ROOT / "agentkv/sessions/metrics.py").read_text()
    exported = set(re.findall(r'(?:_gauge|_counter)\("([a-z_]+)"', source))
    exported |= set(re.findall(r'MetricFamily\("agentkv_([a-z_]+)"', source))
    for name in PAGES:
        for metric in re.findall(r"`agentkv_([a-z_]+)`", text_of(name)):
            assert metric.removesuffix("_total") in exported, (name, metric)


def test_entry_points_are_those_of_the_registries() -> None:
    kinds = {f"agentkv.{each.kind}" for each in (RETENTION, RESIDENCY, CODECS, LAYOUTS, TOOL_FORMATS, BLOBS)}
    text = text_of("docs/extending.md")
    assert kinds <= set(re.findall(r"\| `(agentkv\.[a-z_]+)` \|", text))
    assert set(re.findall(r'entry-points\."([^"]+)"', text)) <= kinds


@pytest.mark.parametrize("name", PAGES)
def test_every_method_that_is_spoken_of_is_there(name: str) -> None:
    text = text_of(name)
    for form, kinds in (
        (r"\bsession\.([a-z_]+)\(", (Session, RemoteSession)),
        (r"\bkv\.sessions\.([a-z_]+)", (Sessions, RemoteSessions)),
        (r"\bkv\.([a-z_]+)\(", (AgentKV, AsyncAgentKV)),
    ):
        for method in set(re.findall(form, text)):
            assert any(hasattr(kind, method) for kind in kinds), (name, method)


def test_every_option_of_a_call_in_readme_is_one() -> None:
    for call, method, more in (
        (r"kv\.sessions\.create\(([^)]*)\)", Sessions.create, set()),
        (r"session\.send\(([^)]*)\)", Session.send, {*SamplingParams.model_fields, "schema"}),
        (r"AgentKV\.open\(([^)]*)\)", AgentKV.open, set(Settings.model_fields)),
    ):
        known = more | set(inspect.signature(method).parameters)
        given = {name for text in re.findall(call, text_of("README.md")) for name in re.findall(r"\b(\w+)=", text)}
        assert given and given <= known, (method, given - known)


def test_the_changelog_names_the_formats_on_disk() -> None:
    container = (ROOT / "agentkv/storage/container.py").read_text()
    exports = re.search(r"^_FORMAT = (\d+)$", container, re.MULTILINE)
    assert exports is not None
    said = f"chunk files {FORMAT}, exports {exports[1]}, database schema {REVISIONS[-1][:4]}"
    assert said in text_of("CHANGELOG.md"), said


def test_figures_of_the_docs_are_those_of_the_readme() -> None:
    """A measured figure is stated where it was measured: README and docs/codecs.md; other pages only repeat it."""
    stated = set(numbers(text_of("README.md"))) | set(numbers(text_of("docs/codecs.md")))
    for name in ("docs/choosing.md", "docs/benchmarks.md"):
        rows = [line for line in text_of(name).splitlines() if re.search(r"\d+(\.\d+)? (s|ms|MB|%)|\d\.\d\d", line)]
        assert rows
        for row in rows:
            assert set(numbers(row)) <= stated, (name, set(numbers(row)) - stated, row)


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d(?:[\d,]*\d)?(?:\.\d+)?(?![\w.]*\w)", text)
