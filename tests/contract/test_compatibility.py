"""The compatibility page is what the server and the installed SDK make of it today."""

import compatibility
import pytest
import tinker

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def measured():
    return compatibility.measure()


def test_no_public_method_fails(measured):
    assert [line for line in measured[0] if line.outcome == compatibility.FAILS] == []


def test_every_argument_that_the_page_calls_refused_is_refused(measured):
    assert [line for line in measured[1] if line.outcome != compatibility.REFUSED or not line.note] == []


def test_the_page_is_up_to_date(measured):
    assert compatibility.PAGE.read_text() == compatibility.page(*measured), (
        "run .venv/bin/python tests/support/compatibility.py, and look at what changed"
    )


def test_every_client_and_method_of_the_sdk_is_on_the_page():
    named = {kind.__name__ for kind in compatibility.CLASSES}
    assert {name for name in tinker.__all__ if name.endswith(("Client", "Future"))} <= named
    sections = dict(part.partition("\n")[::2] for part in compatibility.PAGE.read_text().split("\n## ")[1:])
    for kind in compatibility.CLASSES:
        absent = [n for n in compatibility.public_methods(kind) if f"`{n}`" not in sections[kind.__name__]]
        assert absent == []
