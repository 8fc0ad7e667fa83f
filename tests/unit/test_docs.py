"""What is written about the product is what its tests know."""

from families_table import PAGE, page


def test_the_table_of_families_is_that_of_the_tests() -> None:
    assert PAGE.read_text() == page(), "run `python tests/families_table.py`"
