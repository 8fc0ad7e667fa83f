"""Fenced code blocks of a page, in order, with the section they are in and the comment above them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "blocks_of", "commands_of", "pages"]

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_BEFORE = re.compile(r"<!-- before: (.+?) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """``line`` of its first line of code, counted from 1. ``title``: the file that it is. ``not_run``: why not.
    ``before``: a command that makes what the reader of the page has already."""

    page: str
    line: int
    section: int
    language: str
    code: str
    title: str | None
    not_run: str | None
    before: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README, what lies beside it, and docs."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(path: Path, text: str | None = None) -> list[Block]:
    """All fenced blocks. A section begins with a heading of the second level."""
    found: list[Block] = []
    lines = (path.read_text() if text is None else text).splitlines()
    page = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    section, at = 0, 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            section += lines[at].startswith("## ")
            at += 1
            continue
        start = at + 1
        at = next(n for n in range(start, len(lines)) if lines[n].strip() == fence["fence"])
        indent = len(fence["indent"])
        code = "\n".join(line[indent:] for line in lines[start:at]) + "\n"
        info = fence["info"].strip()
        above = lines[start - 2].strip() if start >= 2 else ""
        title, why, before = _TITLE.search(info), _NOT_RUN.fullmatch(above), _BEFORE.fullmatch(above)
        found.append(
            Block(
                page,
                start + 1,
                section,
                info.split()[0] if info else "",
                code,
                title[1] if title else None,
                why[1] if why else None,
                before[1] if before else None,
            )
        )
        at += 1
    return found


def commands_of(block: Block) -> list[str]:
    """What a reader types: of a ``console`` block what is behind ``$``, and lines that a quote or ``\\`` continues."""
    if block.language != "console":
        return [block.code]
    found: list[str] = []
    open_end = False
    for line in block.code.splitlines():
        if open_end:
            found[-1] += f"\n{line}"
        elif line.startswith("$ "):
            found.append(line[2:])
        else:
            continue
        open_end = _open(found[-1])
    return found


def _open(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
