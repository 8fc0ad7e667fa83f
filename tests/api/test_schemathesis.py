"""Every operation of the OpenAPI document, called with what it allows and with what it does not, by schemathesis.

No answer is 500, none has a status, a type, a header or a body that the document does not say; 503 only where it does.
What the document forbids is refused, a key is needed where it says so, and other methods are not taken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from asking import quiet
from homes import chat_folder
from served import Served

# Not `ensure_resource_availability`: the ids that other calls are given are real ones, and some of them delete.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ignored_auth",
)
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503]
"""
SHORT = """
[phases.coverage]
unexpected-methods = ["PUT", "PATCH"]

[[operations]]
include-name-regex = "POST .*(completions|responses|input_tokens|messages|regenerate|items|sessions|conversations)$"
[operations.phases.coverage]
enabled = false
"""
"""Bodies of many fields have too many combinations for a short run: these are drawn, not enumerated."""
TESTS = Path(__file__).parents[1]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    model = chat_folder(tmp_path / "models")
    with quiet(tmp_path / "home", model, max_tokens=4) as running:
        yield running


@pytest.fixture
def key(served: Served) -> str:
    command = [sys.executable, "-m", "agentkv.cli.main", "keys", "create", "fuzz", "--admin", "--json"]
    made = subprocess.run([*command, "--home", str(served.home)], capture_output=True, text=True, check=True)
    return str(json.loads(made.stdout)["secret"])


def fuzzed(served: Served, key: str, folder: Path, *options: str, config: str = "") -> dict[str, dict[int, int]]:
    """How often each operation answered with each status. ``AssertionError``, with the calls to repeat, where a check
    failed."""
    settings, told = folder / "schemathesis.toml", folder / "told.json"
    settings.write_text(CONFIG + config)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
    command += [f"{served.url}/openapi.json", "--checks", ",".join(CHECKS), "--mode", "all", "--no-color"]
    command += ["--header", f"Authorization: Bearer {key}", "--request-timeout", "20", "--continue-on-failure"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "SCHEMATHESIS_HOOKS": "fuzzing",
        "FUZZED_URL": served.url,
        "FUZZED_KEY": key,
        "FUZZED_TOLD": str(told),
    }
    ran = subprocess.run([*command, *options], env=environment, cwd=folder, capture_output=True, text=True)
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for line, count in json.loads(told.read_text()).items():
        status, _, operation = line.partition(" ")
        found[operation][int(status)] = count
    return found


def operations(served: Served) -> set[str]:
    document = requests.get(f"{served.url}/openapi.json", timeout=30).json()
    return {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}


def check_reached(served: Served, found: dict[str, dict[int, int]]) -> None:
    """Nothing was passed over, and all that can be done was done at least once."""
    done = {operation for operation, statuses in found.items() if any(status < 300 for status in statuses)}
    # The document itself is asked for before the first call; only what is in progress can be cancelled.
    assert operations(served) - done == {"GET /openapi.json", "POST /v1/responses/{response_id}/cancel"}


def test_each_operation_keeps_to_the_document(served: Served, key: str, tmp_path: Path) -> None:
    options = ("--phases", "examples,coverage,fuzzing", "-n", "3", "--generation-deterministic")
    check_reached(served, fuzzed(served, key, tmp_path, *options, config=SHORT))
    assert served.stop() == 0


@pytest.mark.full
@pytest.mark.timeout(600)
def test_each_operation_keeps_to_the_document_in_many_ways(served: Served, key: str, tmp_path: Path, seed: int) -> None:
    options = ("--phases", "examples,coverage,fuzzing,stateful", "-n", "40", "--generation-database", "none")
    check_reached(served, fuzzed(served, key, tmp_path, *options, "--seed", str(seed)))
    assert served.stop() == 0
