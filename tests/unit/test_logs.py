"""One line an event, whatever is in it; who configures what; which words of an error are told."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentkv import logs
from agentkv.errors import ChunkFault, EngineFailed, InvalidRequest, StorageFull, TemplateError
from agentkv.logs import JsonFormatter, Log, TextFormatter, configure_logging, fault

MARK = "tulips at midnight"
VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.binary()
NAMES = st.from_regex(r"[a-z][a-z_]{0,11}", fullmatch=True).filter(lambda n: n not in logs._RESERVED)
FIELD = re.compile(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^" ]+)')


def read(line: str) -> tuple[str, dict[str, Any]]:
    """A line as somebody else would read it, who knows of the format what its module says."""
    event, fields, at = line.split(" ")[0], {}, len(line.split(" ")[0])
    while at < len(line):
        found = FIELD.match(line, at)
        assert found is not None, line[at:]
        name, value = found.groups()
        word = value[0] not in '"-0123456789' and value not in ("null", "true", "false")
        fields[name] = value if word else json.loads(value)
        at = found.end()
    return event, fields


def expected(fields: dict[str, Any]) -> dict[str, Any]:
    """What a reader is to get of them."""
    finite = {
        n: str(v) if isinstance(v, float) and (v != v or abs(v) == float("inf")) else v for n, v in fields.items()
    }
    return {n: v if isinstance(v, bool | int | float | str) else str(v) for n, v in finite.items() if v is not None}


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def logged(event: str, fields: dict[str, Any]) -> logging.LogRecord:
    logger, kept = logging.getLogger("agentkv.unit"), Kept()
    logger.addHandler(kept)
    try:
        Log("agentkv.unit").warning(event, **fields)
    finally:
        logger.removeHandler(kept)
    (record,) = kept.records
    return record


@given(st.dictionaries(NAMES, VALUES, max_size=5))
@example({"a": 'one\nline="two"'})
@example({"a": "true", "b": "12", "c": "", "d": "null", "e": "-", "f": "a=b", "g": "\\"})
@example({"a": "\u2028", "b": "\x85", "c": "\x1b[31m", "d": "\u202e", "e": "\U000e0041"})
def test_whatever_is_in_a_field_the_line_is_one_and_reads_back(fields: dict[str, Any]) -> None:
    record = logged("something_happened", fields)
    line = TextFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert line.isprintable(), "nothing in it moves a terminal's cursor"
    assert read(record.getMessage()) == ("something_happened", expected(fields))
    assert line.endswith(record.getMessage())


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_as_json_it_is_one_object_a_line_with_the_same_fields(fields: dict[str, Any]) -> None:
    line = JsonFormatter().format(logged("something_happened", fields))
    assert len(line.splitlines()) == 1 and line.isascii()
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert (found.pop("level"), found.pop("logger")) == ("warning", "agentkv.unit")
    assert (found.pop("event"), found) == ("something_happened", expected(fields))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_half_a_surrogate_pair_can_be_written(formatter: logging.Formatter) -> None:
    line = formatter.format(logged("odd", {"path": "a\ud800b"}))
    assert "a\\ud800b" in line
    line.encode()


def test_any_handler_can_read_the_fields() -> None:
    class Tier(StrEnum):
        DISK = "disk"

    record = logged("moved", {"tier": Tier.DISK, "path": Path("/a b"), "tokens": 3, "session": None})
    assert record.__dict__["event"] == "moved"
    assert record.__dict__["fields"] == {"tier": "disk", "path": "/a b", "tokens": 3}
    assert type(record.__dict__["fields"]["tier"]) is str
    assert record.getMessage() == 'moved tier=disk path="/a b" tokens=3'
    assert (record.filename, record.funcName) == ("test_logs.py", "logged"), (
        "where it was logged, not where lines are made"
    )


@pytest.mark.parametrize("name", ["time", "level", "logger", "event"])
def test_a_field_cannot_hide_what_every_line_has(name: str) -> None:
    with pytest.raises(ValueError, match=f"may not be called {name}"):
        Log("agentkv.unit").debug("odd", **{name: 1})


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_what_a_plug_in_logs_in_its_own_way_is_one_line_without_its_errors_words(formatter: logging.Formatter) -> None:
    logger, kept = logging.getLogger("agentkv.plugin"), Kept()
    logger.addHandler(kept)
    try:
        raise ValueError(f"cannot tokenize\n{MARK}")
    except ValueError:
        logger.exception("two\nlines of %s", "mine")
    finally:
        logger.removeHandler(kept)
    line = formatter.format(kept.records[0])
    assert len(line.splitlines()) == 1
    assert MARK not in line
    assert r"two\nlines of mine" in line
    assert "ValueError" in line and "test_logs.py" in line


# -- errors ------------------------------------------------------------------------------------------------------------


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [ValueError(MARK), InvalidRequest(MARK), TemplateError(MARK), EngineFailed(f"it raised {MARK}"), KeyError(MARK)],
)
def test_words_that_may_quote_a_prompt_are_not_told_but_the_place_is(error: Exception) -> None:
    told = fault(raised(error))
    assert told.keys() == {"error", "at"}
    assert told["error"] == type(error).__name__
    assert re.fullmatch(r"unit/test_logs\.py:\d+:raised", told["at"])


def test_of_a_deep_error_the_innermost_places_come_first() -> None:
    def deeper(n: int) -> None:
        if not n:
            raise ValueError(MARK)
        deeper(n - 1)

    try:
        deeper(30)
    except ValueError as error:
        places = fault(error)["at"].split(" < ")
    assert len(places) == 8
    first = int(places[0].split(":")[1])
    assert all(int(place.split(":")[1]) > first for place in places[1:])


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (StorageFull("the disk is full: free 3 MB"), "the disk is full: free 3 MB"),
        (ChunkFault("7c21", "missing", "no such file"), "chunk 7c21: missing: no such file"),
        (PermissionError(13, "Permission denied", "/x"), "[Errno 13] Permission denied: '/x'"),
    ],
)
def test_words_of_our_own_are_told(error: Exception, detail: str) -> None:
    assert fault(error) == {"error": type(error).__name__, "detail": detail}


# -- who configures what -----------------------------------------------------------------------------------------------


@pytest.fixture
def as_it_was() -> Iterator[None]:
    logger = logging.getLogger("agentkv")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.usefixtures("as_it_was")
def test_a_program_may_configure_again_and_each_event_is_still_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", logging.INFO)
    configure_logging("json")
    log = Log("agentkv.unit")
    log.info("first")
    log.debug("hidden")
    configure_logging("text", logging.DEBUG)
    log.debug("second", n=1)
    logging.getLogger("aiosqlite").debug("INSERT %s", MARK)
    first, second = capsys.readouterr().err.splitlines()
    assert json.loads(first)["event"] == "first"
    assert second.endswith(" debug agentkv.unit second n=1")


def test_importing_the_package_configures_nothing() -> None:
    code = (
        "import logging, agentkv, agentkv.cli.main, agentkv.sessions.events, agentkv.sessions.control\n"
        "loggers = [logging.getLogger(n) for n in logging.root.manager.loggerDict if n.split('.')[0] == 'agentkv']\n"
        "assert len(loggers) > 1\n"
        "print([l.name for l in (logging.root, *loggers) if l.handlers or not l.propagate])\n"
        "print([l.name for l in loggers if l.level])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr
