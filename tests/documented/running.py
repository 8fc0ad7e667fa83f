"""A page as its reader goes through it: one folder, one home, one Python; servers live as long as their section.

``agentkv`` and ``python`` are forks of the forge. The address ``:8000`` stands for the server's port, ``ID`` and
``sess_…`` in a command for the conversation that was spoken of last, and ``key_…`` for the last key.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from documented.blocks import ROOT, Block, commands_of

__all__ = ["BlockFailed", "Forge", "Page"]

_SAID = "Hello!\nWhat is the capital of France?\n"
"""What the reader types into a command that asks."""
_SETTINGS = {
    "AGENTKV_DISK_MARGIN": "0",
    "AGENTKV_MAX_TOKENS": "16",
    "AGENTKV_OFFLINE": "true",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class BlockFailed(AssertionError):
    """A block did not run as it is printed."""

    def __init__(self, block: Block, what: str) -> None:
        super().__init__(f"{block}: {what}\n--- the block ---\n{block.code}")


class Forge:
    """``documented.forge`` in a process of its own, and a folder with the commands that ask it."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        shim = f"#!{sys.executable} -IS\n" + (ROOT / "tests/documented/shim.py").read_text()
        for name in ("agentkv", "python"):
            (self.bin / name).write_text(shim)
            (self.bin / name).chmod(0o700)
        self.address = str(folder / "s")
        self.paths = [str(ROOT), str(ROOT / "tests")]
        environment = {**os.environ, **_SETTINGS, "PYTHONPATH": os.pathsep.join(self.paths)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "documented.forge", self.address],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Page:
    """``folder``: empty. ``model``: the checkpoint that is ``smollm2-135m`` in the reader's homes."""

    def __init__(self, forge: Forge, folder: Path, model: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        for home in (self.home, folder / "state", folder / "sealed"):
            (home / "models").mkdir(parents=True, mode=0o700)
            (home / "models/smollm2-135m").symlink_to(model)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AGENTKV_")},
            **_SETTINGS,
            "AGENTKV_HOME": str(self.home),
            "FORGE": forge.address,
            "HOME": str(folder),
            "PATH": os.pathsep.join([str(forge.bin), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([*forge.paths, str(folder)]),
        }
        self._python: subprocess.Popen[str] | None = None
        self._server: subprocess.Popen[str] | None = None
        self._address = "127.0.0.1:8000"
        self._spoken = {"session": "sess_…", "key": "key_…"}
        self._section = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        with ExitStack() as all_of_it:
            all_of_it.callback(self._stop_server)
            all_of_it.callback(self._stop_python)

    def run(self, blocks: Iterable[Block]) -> None:
        """In order. ``BlockFailed`` for the first that does not run."""
        for block in blocks:
            if block.section != self._section:
                self._section = block.section
                self._stop_server()
            if block.not_run is not None:
                continue
            match block.language:
                case "python":
                    self._run_python(block)
                case "console" | "bash" | "sh":
                    self._run_shell(block)
                case "toml":
                    self._take_toml(block)
                case "json":
                    json.loads(block.code)
                case "":
                    pass
                case other:
                    raise BlockFailed(block, f"nobody knows how to run {other!r}")

    # -- Python -------------------------------------------------------------------------------------------------------

    def _run_python(self, block: Block) -> None:
        if block.before is not None:
            self._run_command(block, self._here(block.before))
        code = self._here(block.code)
        if block.title is not None:
            compile(code, block.title, "exec")
            (self.folder / block.title).write_text(code)
            return
        argv = ["page.py", self._spoken["session"]]
        answer = self._ask({"do": "run", "code": code, "file": block.page, "line": block.line, "argv": argv})
        self._listen(answer["printed"])
        if not answer["ok"]:
            raise BlockFailed(block, answer["printed"])

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        if self._python is None:
            self._python = self._popen(["python", "-m", "documented.interpreter"], stderr=None)
        assert self._python.stdin is not None and self._python.stdout is not None
        self._python.stdin.write(json.dumps(what) + "\n")
        self._python.stdin.flush()
        answer = self._python.stdout.readline()
        assert answer, "the page's Python has ended"
        found: dict[str, Any] = json.loads(answer)
        return found

    def _stop_python(self) -> None:
        if self._python is not None:
            python, self._python = self._python, None
            _, _ = python.communicate(timeout=60)

    # -- shell --------------------------------------------------------------------------------------------------------

    def _run_shell(self, block: Block) -> None:
        if self._python is not None and "agentkv" in block.code:
            self._ask({"do": "close"})
        for command in ([block.before] if block.before else []) + commands_of(block):
            self._run_command(block, self._here(command))

    def _run_command(self, block: Block, command: str) -> None:
        if re.match(r"agentkv serve\b", command):
            self._serve(block, command)
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self._environment,
            input=_SAID,
            capture_output=True,
            text=True,
            timeout=240,
        )
        self._listen(done.stdout)
        if done.returncode != 0:
            raise BlockFailed(block, f"`{command}` ended with {done.returncode}\n{done.stdout}{done.stderr}")
        if command.startswith("curl") and '"error":' in done.stdout:
            raise BlockFailed(block, f"`{command}` was answered {done.stdout}")

    def _serve(self, block: Block, command: str) -> None:
        self._stop_server()
        argv = [*shlex.split(command, comments=True), "--port", "0"]
        self._server = self._popen(argv, stderr=subprocess.STDOUT)
        assert self._server.stdout is not None
        said: list[str] = []
        for line in self._server.stdout:
            said.append(line)
            if found := re.search(r"serving .* at http://(\S+)", line):
                self._address = found[1]
                return
        raise BlockFailed(block, f"no server: {''.join(said)}")

    def _stop_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)

    def _popen(self, argv: list[str], stderr: int | None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            argv,
            executable=str(Path(self._environment["PATH"].split(os.pathsep)[0]) / argv[0]),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _take_toml(self, block: Block) -> None:
        """``agentkv.toml`` goes to the home; a project's entry points count as if pip had installed it."""
        data = tomllib.loads(block.code)
        if block.title == "agentkv.toml":
            (self.home / block.title).write_text(block.code)
            check = "from agentkv import Settings\nfrom agentkv.api.settings import server_settings\n"
            self._run_python(
                Block(block.page, block.line, 0, "python", check + "server_settings(Settings().home)\n", None, None)
            )
            return
        project = data["project"]
        installed = self.folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project["entry-points"].items()
        points = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in of.items()) for group, of in groups
        )
        (installed / "entry_points.txt").write_text(points)

    def _here(self, text: str) -> str:
        text = re.sub(r"(?:127\.0\.0\.1|localhost):8000", self._address, text)
        text = re.sub(r"\bID\b|sess_…", self._spoken["session"], text)
        return text.replace("key_…", self._spoken["key"])

    def _listen(self, printed: str) -> None:
        for kind, form in (("session", r"sess_[0-9a-f]{32}"), ("key", r"key_[0-9a-zA-Z]+")):
            with suppress(IndexError):
                self._spoken[kind] = re.findall(form, printed)[-1]
