"""`agentkv bench all` and `--against`: every part runs for real, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from homes import chat_folder
from served import Served
from typer.testing import CliRunner

from agentkv.bench.agents import bench_agents
from agentkv.bench.suite import Suite, run_suite
from agentkv.bench.traffic import Traffic
from agentkv.cli.main import app
from agentkv.errors import InvalidRequest

TRAFFIC = Traffic(
    sessions=4, turns=3, kinds=2, head_tokens=100, result_median_tokens=40, result_most_tokens=120, answer_tokens=6,
    compression=10_000,
)  # fmt: skip
PICTURES = {"resume", "growth", "residency", "codecs"}


def folder(root: Path, context: int) -> Path:
    made = chat_folder(root)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("models"), 8192)


@pytest.mark.full
async def test_each_part_is_measured_drawn_and_told(model: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "new" / "out", list[str]()
    suite = Suite(str(model), tmp_path / "home", "float32", None, True, traffic=TRAFFIC)
    assert await run_suite(suite, out, say=said.append) == []
    results = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    assert results.keys() == suite.parts().keys() and len(said) == len(results)
    assert all("error" not in result and result["seconds"] > 0 for result in results.values())
    assert {file.stem for file in out.glob("*.png")} == PICTURES
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in out.glob("*.png"))
    report = (out / "report.md").read_text()
    assert "Not measured" not in report and "nan" not in report and "**Quick**" in report
    for name in PICTURES:
        assert f"({name}.png)" in report
    for row in results["resume"]["lengths"]:
        assert row["identical"] and f"| {row['tokens']:,} |" in report
    held = results["growth"]["policies"]
    assert held["full"]["points"][-1][1] > 2 * held["sink:512"]["points"][-1][1]
    assert results["residency"]["policies"].keys() == {"lru", "lfu", "ttl", "cost"}


@pytest.mark.full
async def test_a_part_that_fails_is_told_and_stops_no_other(tmp_path: Path) -> None:
    suite = Suite(str(folder(tmp_path, 700)), tmp_path / "home", "float32", None, True, traffic=TRAFFIC)
    failed = await run_suite(suite, tmp_path / "out")
    assert "resume" in failed and "decode" not in failed
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Not measured: ContextTooLong" in report and "## Tokens a second" in report
    assert "error" in json.loads((tmp_path / "out" / "resume.json").read_text())


def test_a_folder_that_cannot_be_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["bench", "all", "--out", str(tmp_path / "file"), "--model", "nowhere"])
    assert result.exit_code != 0 and "--out cannot be made a folder" in result.output


@pytest.mark.full
async def test_a_server_by_its_url_is_given_the_same_traffic(model: Path, tmp_path: Path) -> None:
    with Served(tmp_path / "served", model) as server:
        target = f"{server.url}/v1", None, None
        result = await bench_agents(TRAFFIC, None, 4, str(model), tmp_path / "home", against=target, dtype="float32")
    theirs = result["against"]
    assert theirs["turns"] == TRAFFIC.sessions * TRAFFIC.turns and not theirs["errors"]
    assert 0.5 < theirs["reused_share"] <= 1, "this server recognises what it is sent"
    assert theirs["ttft_p50_s"] > 0
    assert result["against_ratio_ttft_p50"] == theirs["ttft_p50_s"] / result["ttft_p50_s"]


async def test_a_url_where_nobody_answers_is_named(model: Path, tmp_path: Path) -> None:
    target = "http://127.0.0.1:9/v1", None, None
    with pytest.raises(InvalidRequest, match=r"http://127\.0\.0\.1:9/v1/models does not answer"):
        await bench_agents(TRAFFIC, None, 4, str(model), tmp_path / "home", against=target, dtype="float32")
