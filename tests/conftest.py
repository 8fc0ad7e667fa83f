"""What all tests share: a printed seed, few threads, hypothesis without deadlines, the fixture folder."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocking import nothing_blocks
from hypothesis import HealthCheck, settings

# Before torch is imported: the tests share their cores with each other.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_WATCHED = {"integration", "api"}
SEED = int(os.environ.get("AGENTKV_TEST_SEED", "0"))

# Where the shell started this in the background, what the tests start would ignore Ctrl-C as this does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "agentkv", deadline=None, print_blob=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("agentkv")


def pytest_report_header() -> str:
    return f"agentkv seed: {SEED} (AGENTKV_TEST_SEED=… chooses another)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``short(n)``, all cases but ``n``, taken at even distances, are marked ``full``."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("short") and not item.get_closest_marker("full"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        mark = each[0].get_closest_marker("short")
        assert mark is not None and mark.args[0] >= 1
        count = min(mark.args[0], len(each))
        kept = {round(index * (len(each) - 1) / max(count - 1, 1)) for index in range(count)}
        for index, item in enumerate(each):
            if index not in kept:
                item.add_marker(pytest.mark.full)


@pytest.fixture
def seed() -> int:
    """The run's seed, for tests that draw something."""
    return SEED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)


@pytest.fixture(autouse=True)
def unblocked(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """In ``integration`` and ``api`` nothing of ``agentkv`` may block the event loop: what did, in words."""
    if not _WATCHED & set(request.path.parts):
        yield []
        return
    with nothing_blocks() as found:
        yield found
    assert not found, "the event loop was blocked:\n" + "\n".join(found)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of checked-in files."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M in the home of ``AGENTKV_TEST_HOME``, by default the user's own; pulled where it is not."""
    from agentkv.models import pull
    from agentkv.settings import Settings

    home = os.environ.get("AGENTKV_TEST_HOME")
    return pull("smollm2-135m", Settings(home=Path(home)) if home else Settings()).path
