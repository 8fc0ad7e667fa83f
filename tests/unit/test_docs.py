"""What is written about the product is what its tests know."""

import re
from pathlib import Path

from families_table import PAGE, page

TESTS = Path(__file__).parent.parent
RELIABILITY = TESTS.parent / "docs" / "reliability.md"


def test_the_table_of_families_is_that_of_the_tests() -> None:
    assert PAGE.read_text() == page(), "run `python tests/families_table.py`"


def rows() -> dict[int, str]:
    """The table of ``docs/reliability.md``: number of a fault, the rest of its line."""
    found = re.findall(r"^\| (\d+) \| (.+) \|$", RELIABILITY.read_text(), re.MULTILINE)
    return {int(number): rest for number, rest in found}


def test_every_fault_has_a_line_that_names_its_test_or_says_that_there_is_none() -> None:
    assert list(rows()) == list(range(1, 39))
    for number, line in rows().items():
        assert "::test_" in line or "no part yet" in line, number


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", RELIABILITY.read_text())
    assert len(named) == RELIABILITY.read_text().count("::") > 38, "each is written `file.py::test_name`"
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (TESTS / file).is_file()
        or not re.search(rf"^(async )?def {test}\(", (TESTS / file).read_text(), re.MULTILINE)
    ]
    assert missing == []
