"""Every command and every program in README and docs runs as it is printed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented.blocks import ROOT, Block, blocks_of, pages
from documented.running import BlockFailed, Forge, Page
from homes import chat_folder

from agentkv.models.local import write_marker

SHORT = ("README.md", "docs/start.md")
"""Pages that `make test` runs; `make test-full` runs all."""
REASONS = {
    "installs software": 4,
    "needs a server of your own": 1,
}
"""Why a block may not be run, and how many such blocks there may be."""
WITH_THE_MODEL = ("docs/integrations.md",)
"""Pages whose libraries take no answer that was cut: a random model ends none by itself."""
PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages()}

pytestmark = pytest.mark.skipif(shutil.which("curl") is None or shutil.which("bash") is None, reason="no curl or bash")


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    running = Forge(tmp_path_factory.mktemp("f"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random chat model of two layers, with SmolLM2's name and context."""
    folder = chat_folder(tmp_path_factory.mktemp("tiny"), label="smollm2-135m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    write_marker(folder, name="smollm2-135m", source="a random model", licence=None)
    return folder


def run(path: Path, forge: Forge, folder: Path, model: Path) -> None:
    with Page(forge, folder, model) as page:
        page.run(blocks_of(path))


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in PAGES]
)
def test_every_block_runs_as_it_is_printed(
    name: str, forge: Forge, tiny: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue("smollm2_path") if name in WITH_THE_MODEL else tiny
    run(PAGES[name], forge, tmp_path, model)


@pytest.mark.full
def test_the_first_ten_minutes_with_the_model_itself(forge: Forge, smollm2_path: Path, tmp_path: Path) -> None:
    run(PAGES["docs/start.md"], forge, tmp_path, smollm2_path)


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "await session.sned('Hello!')\n"),
        ("python", "from agentkv import AgentKeyValue\n"),
        ("python", "reply = await session.send('Hello!', max_tokens=4)\nassert reply.usage.cached_tokens == -1\n"),
        ("console", "$ agentkv sessions list --no-such-option\n"),
        ("console", "$ agentkv chat --session sess_00000000000000000000000000000000\n"),
        ("console", '$ agentkv serve\n$ curl -s localhost:8000/v1/sessions -d \'{"sytem": "You are Bolt."}\'\n'),
        ("toml", 'idle_seconds = "soon"\n'),
    ],
)
def test_a_block_that_is_wrong_is_found(language: str, code: str, forge: Forge, tiny: Path, tmp_path: Path) -> None:
    title = ' title="agentkv.toml"' if language == "toml" else ""
    broken = tmp_path / "broken.md"
    broken.write_text(f"# Broken\n\n```{language}{title}\n{code}```\n")
    (tmp_path / "page").mkdir()
    with pytest.raises(BlockFailed, match=r"broken\.md:4"):
        run(broken, forge, tmp_path / "page", tiny)


def every_block() -> list[Block]:
    return [block for path in PAGES.values() for block in blocks_of(path)]


def test_what_is_not_run_is_little_and_says_why() -> None:
    skipped: dict[str, list[str]] = {}
    for block in every_block():
        if block.not_run is not None:
            skipped.setdefault(block.not_run, []).append(str(block))
    assert skipped.keys() <= REASONS.keys(), skipped
    for reason, found in skipped.items():
        assert len(found) <= REASONS[reason], (reason, found)


def test_every_block_says_its_language_or_is_a_drawing() -> None:
    known = {"python", "console", "bash", "sh", "toml", "json"}
    for block in every_block():
        if block.language not in known:
            assert block.language == "" and "$ " not in block.code and "import " not in block.code, block
