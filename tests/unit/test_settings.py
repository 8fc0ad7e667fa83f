"""Settings: where they come from, and what is said of a name that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from agentkv.api.settings import ServerSettings
from agentkv.settings import Settings


def test_a_variable_that_is_no_setting_is_told_with_the_one_that_may_be_meant() -> None:
    environ = {
        "AGENTKV_IDEL_CODEC": "exact",
        "AGENTKV_SERVICE_HOST": "10.0.0.1",
        "AGENTKV_IDLE_CODEC": "exact",
        "AGENTKV_SERVER_PORT": "1",
        "AGENTKV_SERVER_PROT": "1",
        "AGENTKV_CONFIG": "there",
        "AGENTKV_TEST_SEED": "1",
        "agentkv_home": "there",
        "PATH": "there",
    }
    assert Settings.unknown_variables(environ) == {
        "AGENTKV_IDEL_CODEC": "AGENTKV_IDLE_CODEC",
        "AGENTKV_SERVICE_HOST": None,
    }
    assert ServerSettings.unknown_variables(environ) == {"AGENTKV_SERVER_PROT": "AGENTKV_SERVER_PORT"}


def test_an_unknown_keyword_or_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="idel_codec"):
        Settings(home=tmp_path, idel_codec="exact")  # type: ignore[call-arg]
    (tmp_path / "agentkv.toml").write_text('idel_codec = "exact"\n')
    with pytest.raises(ValidationError, match="idel_codec"):
        Settings(home=tmp_path)


def test_keywords_are_stronger_than_the_environment_and_that_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agentkv.toml").write_text("max_tokens = 3\nadmission_queue = 3\njoint_rows = 3\n")
    monkeypatch.setenv("AGENTKV_MAX_TOKENS", "2")
    monkeypatch.setenv("AGENTKV_ADMISSION_QUEUE", "2")
    found = Settings(home=tmp_path, max_tokens=1)
    assert (found.max_tokens, found.admission_queue, found.joint_rows) == (1, 2, 3)
