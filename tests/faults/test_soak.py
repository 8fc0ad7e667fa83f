"""``tests/soak.py`` for a while: random traffic, a fault a second, and nothing wrong, lost, leaked or growing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "soak.py"


def soak(minutes: float, seed: int, family: str) -> dict[str, Any]:
    """The summary of a soak in a process of its own: it sets clocks, and is measured."""
    command = [sys.executable, str(PROGRAM), "--minutes", str(minutes), "--seed", str(seed), "--families", family]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.full
def test_ten_seconds_of_random_traffic_with_a_fault_a_second(seed: int) -> None:
    summary = soak(10 / 60, seed, "gemma3")
    assert summary["killed"] >= 1
    assert sum(summary["faults"].values()) >= 2
    assert summary["tokens"]["recomputed"] > 0


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_minute_of_random_traffic_with_a_fault_a_second(seed: int, family: str) -> None:
    summary = soak(1, seed + 1, family)
    assert summary["killed"] >= 1
    assert len(summary["faults"]) >= 5
    assert sum(summary["restores"].values()) > 20
    assert min(summary["tokens"]["recomputed"], summary["tokens"]["twin"]) > 50
