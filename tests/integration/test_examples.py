"""The examples, run as their heads say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from homes import chat_folder

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, *options: object, seconds: float = 280) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, options)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env={**os.environ, "AGENTKV_DISK_MARGIN": "0"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_crash(said: str) -> None:
    first, second = said.split("kill -9, in the middle of a turn")
    assert first.count("tokens not computed") == 4
    assert "4 of 8 entries are in the log" in second and "all entries are in the log" in second
    assert second.count("tokens not computed") == 4
    found = re.search(r"Entry 5: .* KV from disk, (\d+) of \d+ tokens", second)
    assert found is not None and int(found[1]) > 0


def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    model = chat_folder(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    check_crash(run("crash.py", "--model", model, "--home", tmp_path / "home"))


@pytest.mark.full
def test_with_the_model_that_they_are_written_for(smollm2_path: Path, tmp_path: Path) -> None:
    check_crash(run("crash.py", "--model", smollm2_path, "--home", tmp_path / "crash"))
    said = run("research_agent.py", "--model", smollm2_path, "--home", tmp_path / "research", "--pause", 0.5)
    assert said.count("tokens not computed") == 4 and said.count("hint ") == 4
    assert "[from disk]" in said
    said = run("fleet.py", "--model", smollm2_path, "--home", tmp_path / "fleet")
    share = re.search(r"known tokens were not computed again: ([\d.]+)%", said)
    assert "100 agents, 300 turns" in said and share is not None and float(share[1]) > 97
    used = re.search(r"([\d,]+) of ([\d,]+) bytes on the device", said)
    assert used is not None and int(used[1].replace(",", "")) <= int(used[2].replace(",", ""))
