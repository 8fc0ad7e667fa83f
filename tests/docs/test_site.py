"""The site builds from docs and code without a warning and without a network, and every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from documented.blocks import ROOT, pages

from agentkv.api.routes import ROUTES
from agentkv.api.settings import ServerSettings
from agentkv.settings import Settings

LOADED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])+\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


@dataclass
class Html(HTMLParser):
    """What a page can be linked by, and what it links to and loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.ids |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        self.loads += [of[name] for kind, name in LOADED if kind == tag and name in of and of.get("rel") != "canonical"]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def built(folder: Path, *, config: str = "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Html]:
    """All pages of the site by their path in it."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr and "ERROR" not in done.stderr, done.stderr
    found = {}
    for path in folder.rglob("*.html"):
        page = Html()
        page.feed(path.read_text())
        found[path.relative_to(folder)] = page
    assert Path("index.html") in found
    return found


def test_every_page_is_in_the_site_and_loads_nothing_from_elsewhere(site: dict[Path, Html]) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert Path(page.name).with_suffix(".html") in site
    for path, page in site.items():
        for load in page.loads:
            assert not urlsplit(load).scheme and not load.startswith("//"), (path, load)


def test_every_link_of_the_site_leads_to_a_place_that_is_there(site: dict[Path, Html]) -> None:
    checked = 0
    for path, page in site.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            if _is_external(link):
                continue
            parts = urlsplit(link)
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.suffix == "" else target
            assert target in site, (path, link)
            assert not parts.fragment or unquote(parts.fragment) in site[target].ids, (path, link)
            checked += 1
    assert checked > 500


def test_the_references_are_whole_and_of_this_code(site: dict[Path, Html]) -> None:
    rest, sdk, operations = ("".join(site[Path(name)].text) for name in ("rest.html", "sdk.html", "operations.html"))
    for route in ROUTES:
        assert f"{route.method} {route.path}" in rest
    for kind in (Settings, ServerSettings):
        for name, about in kind.model_fields.items():
            assert name in operations and about.description
    for name in ("regenerate", "prefetch", "RestoreReport", "CapacityExceeded", "SinkWindow", "RemoteSession"):
        assert name in sdk


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in pages()])
def test_every_link_in_the_sources_leads_to_a_place_that_is_there(name: str) -> None:
    page = ROOT / name
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if _is_external(link):
            continue
        parts = urlsplit(link)
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        assert target.exists(), (name, link)
        assert not parts.fragment or parts.fragment in anchors(target), (name, link)


@pytest.mark.parametrize(
    ("text", "found"),
    [("[gone](gone.md)", "gone.md"), ("[no such place](concepts.md#no-such-place)", "no-such-place")],
)
@pytest.mark.full
def test_a_link_that_leads_nowhere_fails_the_build(text: str, found: str, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Begin\n\n{text}\n")
    (tmp_path / "docs/concepts.md").write_text("# Concepts\n")
    whole = (ROOT / "mkdocs.yml").read_text()
    nav = re.sub(r"\nnav:\n.*?\n\n", "\nnav: [index.md, concepts.md]\n\n", whole, flags=re.DOTALL)
    (tmp_path / "mkdocs.yml").write_text(nav.replace("mkdocs_hooks.py", str(ROOT / "mkdocs_hooks.py")))
    done = built(tmp_path / "site", config=str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0 and found in done.stderr, done.stderr


def _is_external(link: str) -> bool:
    """Whether it leaves this project; if so, it has to be one that a browser takes."""
    parts = urlsplit(link)
    if not parts.scheme and not parts.netloc:
        return False
    assert parts.scheme in ("https", "http") and re.fullmatch(r"[a-z0-9.-]+\.[a-z]{2,}", parts.netloc), link
    return True


@cache
def anchors(page: Path) -> frozenset[str]:
    """What its headings are called in links, as GitHub and the site make it."""
    text = _FENCE.sub("", page.read_text())
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain)
