"""An adapter whose library is not installed says which extra to install; without adapters nothing of them is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import agentkv, agentkv.client, agentkv.integrations
try:
    import agentkv.integrations.{adapter}
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("adapter", "missing", "extra"),
    [
        ("openai_agents", "agents", "openai-agents"),
        pytest.param("openai_agents", "openai", "openai-agents", marks=pytest.mark.full),
        ("langgraph", "langchain_openai", "langgraph"),
        pytest.param("langgraph", "langchain_core", "langgraph", marks=pytest.mark.full),
        pytest.param("langgraph", "openai", "langgraph", marks=pytest.mark.full),
    ],
)
def test_a_missing_library_is_named_with_its_extra(adapter: str, missing: str, extra: str) -> None:
    code = BLOCKED.format(adapter=adapter, missing=missing)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    said = f"agentkv.integrations.{adapter} needs the package {missing!r}: pip install 'agentkv[{extra}]'"
    assert ran.stdout.strip() == said


def test_a_fault_inside_a_library_is_not_called_a_missing_extra() -> None:
    code = BLOCKED.format(adapter="openai_agents", missing="griffe")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "No module named 'griffe'"
