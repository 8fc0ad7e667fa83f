"""The demo, as a user runs it, on the default model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.cli.demo_script import agents

_KEYS = {"id", "tokens", "bytes_disk", "cold_ttft_s", "resumed_ttft_s", "cached_tokens", "identical"}


def test_the_full_demo_has_three_agents_and_a_long_document() -> None:
    cast = agents(quick=False)
    assert len({agent.system for agent in cast}) == 3
    assert all(len(agent.messages) >= 3 for agent in cast)
    assert max(len(agent.messages[0]) for agent in cast) > 12_000
    assert len(agents(quick=True)[2].messages[0]) < len(cast[2].messages[0]) / 2


@pytest.mark.full
@pytest.mark.timeout(900)
def test_demo_sessions_wake_in_another_process_and_continue_identically(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "agentkv.cli.main", "demo", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["sessions"]
    assert len(rows) == 3
    for row in rows:
        assert set(row) == _KEYS
        assert row["identical"] is True
        assert row["cached_tokens"] == row["tokens"] - 1
        assert row["bytes_disk"] > 0
    longest = max(rows, key=lambda row: row["tokens"])
    assert longest["resumed_ttft_s"] < longest["cold_ttft_s"]
    assert not list(temporary.glob("agentkv-demo-*")), "the temporary home was left behind"
