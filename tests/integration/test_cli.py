"""Facts about the command line, in real processes on a tiny random model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from homes import chat_folder

from agentkv.cli.main import app
from agentkv.cli.sessions import span_bar
from agentkv.engine import products
from agentkv.sessions.home import Home
from agentkv.types import Span

_QUIET = {"AGENTKV_DISK_MARGIN": "0", "AGENTKV_PREFILL_TOKENS": "32"}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "agentkv.cli.main", *map(str, args)]


def agentkv(*args: object, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line; its ``stdin`` is a pipe with ``given``."""
    return subprocess.run(
        command(*args), input=given, capture_output=True, text=True, timeout=200, env={**os.environ, **_QUIET}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


def test_help_names_every_command_and_loads_neither_torch_nor_the_runtime() -> None:
    code = (
        "import sys; from agentkv.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'sqlalchemy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    for name in ("demo", "chat", "models", "sessions", "doctor"):
        assert re.search(rf"\b{name}\b", done.stdout)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_error_is_one_line_and_exit_status_one(tmp_path: Path) -> None:
    done = agentkv("sessions", "show", "sess_none", "--home", tmp_path / "home")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: there is no session 'sess_none'; `agentkv sessions list`, or GET /v1/sessions, shows those there are"
    ]
    assert not (tmp_path / "home").exists(), "looking created the home"


@pytest.mark.full
def test_a_chat_goes_on_in_another_process_and_reuses_its_tokens(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    options = ("--home", home, "--model", model, "--device", "cpu", "--max-tokens", 8)
    said = "How is Paris?\n/info\nAnd the weather?\n"
    first = agentkv("chat", "--system", "You are terse. " * 8, *options, given=said)
    assert first.returncode == 0, first.stderr
    session = re.search(r"sess_[0-9a-f]+", first.stdout)
    assert session is not None
    assert f"to go on: agentkv chat --session {session[0]} --home {home} --model {model}" in first.stdout
    reused = re.findall(r"\[([\d,]+) of ([\d,]+) prompt tokens reused", first.stdout)
    assert len(reused) == 2
    assert reused[0][0] == "0"
    assert int(reused[1][0]) > 0
    second = agentkv("chat", "--session", session[0], *options, given="/nonsense\nOnce more?\n/exit\nnot read\n")
    assert second.returncode == 0, second.stderr
    assert "/nonsense is no command" in second.stdout
    (again,) = re.findall(r"\[([\d,]+) of [\d,]+ prompt tokens reused", second.stdout)
    assert int(again) > int(reused[1][0]), "the first process's last turn was not reused"
    assert "KV from disk (exact)" in second.stdout

    listed = json.loads(agentkv("sessions", "list", "--home", home, "--json").stdout)["sessions"]
    assert [row["id"] for row in listed] == [session[0]]
    assert listed[0]["stored_tokens"] == listed[0]["tokens"] - 1, "all but the last token's KV is on disk"
    assert listed[0]["bytes_disk"] > 0
    shown = agentkv("sessions", "show", session[0], "--home", home)
    assert "How is Paris?" in shown.stdout
    assert "not read" not in shown.stdout
    unasked = agentkv("sessions", "rm", session[0], "--home", home, given="n\n")
    assert unasked.returncode == 1
    removed = json.loads(agentkv("sessions", "rm", session[0], "--home", home, "--yes", "--json").stdout)
    assert removed["freed"] >= listed[0]["bytes_disk"]
    assert not [path for path in (home / "blobs").rglob("*") if path.is_file()]


def test_ctrl_c_takes_the_running_turn_back_and_nothing_else(tmp_path: Path, model: Path) -> None:
    talk = subprocess.Popen(
        command("chat", "--home", tmp_path / "home", "--model", model, "--device", "cpu", "--max-tokens", 900),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_QUIET, "PYTHONUNBUFFERED": "1"},
    )
    assert talk.stdin is not None and talk.stdout is not None
    try:
        while "/help shows" not in talk.stdout.readline():
            pass
        talk.stdin.write("Count on and on.\n")
        talk.stdin.flush()
        talk.stdout.read(1)
        talk.send_signal(signal.SIGINT)
        rest, errors = talk.communicate("/info\n/exit\n", timeout=120)
    finally:
        talk.kill()
        talk.wait()
    assert talk.returncode == 0, errors
    assert "this turn was taken back" in rest
    assert re.search(r": 0 turns, 0 tokens", rest)


def test_ctrl_c_ends_a_command_with_status_130(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    running = subprocess.Popen(
        command("chat", "--home", home, "--model", model, "--device", "cpu"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_QUIET},
    )
    try:
        deadline = time.monotonic() + 60
        while not (home / "lock").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130
    assert errors.strip().endswith("interrupted")
    assert "Traceback" not in errors


def test_a_home_in_use_is_refused_with_the_owners_pid(tmp_path: Path) -> None:
    (tmp_path / "agentkv.db").touch()
    home = Home(tmp_path)
    try:
        done = agentkv("sessions", "list", "--home", tmp_path)
    finally:
        home.close()
    assert done.returncode == 1
    assert f"process {os.getpid()}" in done.stderr


def test_doctor_says_what_is_wrong_with_a_broken_home_and_what_to_do(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "agentkv.db").write_bytes(b"this is no database" * 100)
    (home / "agentkv.db").chmod(0o644)
    done = agentkv("doctor", "--fast", "--json", "--home", home, "--model", "smollm2-135m")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    wrong = [problem["what"] for problem in report["problems"]]
    assert any("is damaged" in what for what in wrong)
    assert any(f"{home} is open to other users" in what for what in wrong)
    assert {"what": "the model 'smollm2-135m' is not on this machine", "do": "agentkv models pull smollm2-135m"} in (
        report["problems"]
    )
    assert (home / "agentkv.db").read_bytes().startswith(b"this is no database")


def test_doctor_finds_nothing_wrong_where_nothing_is(tmp_path: Path, model: Path) -> None:
    done = agentkv("doctor", "--json", "--home", tmp_path / "new", "--model", model, "--device", "cpu")
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert done.returncode == 0
    assert report["bits"]["row_counts"][-1] == 32
    assert report["bits"]["max_difference"] < 1e-3
    assert report["versions"]["torch"]
    speed = report["speed"]
    assert speed["gflops"] == speed["gflops_float32"] > 0.1, "the model is float32"


@pytest.mark.full
def test_doctor_says_where_a_dtype_is_emulated(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's own answer; and another machine's, since no one machine gives both."""
    where = ["--json", "--home", str(tmp_path / "new"), "--model", str(model), "--device", "cpu", "--dtype", "bfloat16"]
    report = json.loads(agentkv("doctor", *where).stdout)
    emulated = report["speed"]["gflops_float32"] > 1.5 * report["speed"]["gflops"]
    assert any("slower here than in float32" in warning["what"] for warning in report["warnings"]) == emulated
    monkeypatch.setattr(products, "_rate", lambda dtype, device: 80.0 if dtype == torch.float32 else 10.0)
    with pytest.raises(SystemExit) as exit_:
        app(["doctor", *where])
    assert not exit_.value.code
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "bfloat16 are 8.0 times slower here than in float32 (10 against 80 GFLOP/s)" in warning["what"]
    assert "AGENTKV_DTYPE=float32" in warning["do"]


def test_models_list_shows_licences(tmp_path: Path) -> None:
    done = agentkv("models", "list", "--json", "--home", tmp_path)
    listed = {it["name"]: it for it in json.loads(done.stdout)["models"]}
    assert listed["smollm2-135m"]["licence"] == "Apache-2.0"
    assert listed["gemma3-270m"]["local"] is None


def test_a_wrong_setting_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        app(["doctor", "--fast", "--dtype", "float3"])
    assert exit_.value.code == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: settings: dtype:")


def test_the_bar_shows_pinned_kept_and_given_up() -> None:
    assert span_bar((Span(0, 20), Span(60, 100)), 100, pinned=10, width=10) == "█▓····▓▓▓▓"
    assert span_bar((), 0, width=3) == "···"
