"""What every SDK version was seen to send, sent again: the answers must hold what it was seen to get.

`.venv/bin/python tests/matrix/record.py` records the files anew, in the environments of `make test-matrix`.
"""

import json
from pathlib import Path

import pytest
from recording import PROTOBUF, Ids, answer_of, differences, read_answer, request_of, stable

HERE = Path(__file__).parent
FILES = sorted((HERE / "golden").glob("*.json"))
VERSIONS = (HERE.parent / "matrix" / "versions.txt").read_text().split()


def send(http, exchange, ids):
    """The answer as JSON with placeholders, once it is no longer a 408."""
    for _ in range(20):
        response = http.request(**request_of(exchange, ids))
        if response.status_code != 408:
            break
    path = exchange["request"]["path"]
    answer = read_answer(exchange["request"]["body"], response.headers.get("content-type", ""), response.content)
    ids.learn(path, answer)
    return {"status": response.status_code, "body": stable(path, ids.hide(answer))}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_client_gets_what_it_got(start_server, file):
    ids = Ids()
    with start_server(max_runs=10).http() as http:
        for number, exchange in enumerate(json.loads(file.read_text())["exchanges"]):
            lacking = differences(answer_of(exchange), send(http, exchange, ids))
            assert not lacking, f"exchange {number}, {exchange['request']['path']}: {lacking}"


def test_every_version_is_recorded_with_all_its_encodings():
    encodings = {}
    for file in FILES:
        golden = json.loads(file.read_text())
        for request in (exchange["request"] for exchange in golden["exchanges"]):
            if request["path"].startswith("forward"):
                headers = request["headers"]
                kind = (request["path"], headers.get("content-type") == PROTOBUF, headers.get("content-encoding"))
                encodings.setdefault(golden["sdk"], set()).add(kind)
    binary, packed = ("forward_backward", True, None), ("forward_backward", True, "zstd")
    text = {("forward", False, None), ("forward_backward", False, None)}
    expected = {version: {packed} for version in VERSIONS}
    expected |= {"0.19.0": text | {binary}, "0.22.7": text | {packed}, "0.24.1": text | {packed}}
    assert encodings == expected


@pytest.mark.parametrize(
    ("actual", "lacking"),
    [
        ({"a": [1, {"b": "x"}], "more": 0}, []),
        ({"a": [1, {"b": "y"}]}, ["answer.a[1].b is 'y', not 'x'"]),
        ({"a": [1.0, {"b": "x"}]}, ["answer.a[0] is 1.0, not 1"]),
        ({"a": [1]}, ["answer.a is [1], not [1, {'b': 'x'}]"]),
        ({}, ["answer.a is missing"]),
    ],
)
def test_differences_are_found(actual, lacking):
    assert differences({"a": [1, {"b": "x"}]}, actual) == lacking
