"""A model, and a server that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import quiet
from homes import chat_folder
from served import Served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    with quiet(tmp_path_factory.mktemp("served") / "home", model) as served:
        yield served
