"""What all tests share: a printed seed, few threads, hypothesis without deadlines, the fixture folder."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: the tests share their cores with each other.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SEED = int(os.environ.get("AGENTKV_TEST_SEED", "0"))

settings.register_profile(
    "agentkv", deadline=None, print_blob=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("agentkv")


def pytest_report_header() -> str:
    return f"agentkv seed: {SEED} (AGENTKV_TEST_SEED=… chooses another)"


@pytest.fixture
def seed() -> int:
    """The run's seed, for tests that draw something."""
    return SEED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)


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
