"""Records what each SDK version sends and gets: `.venv/bin/python tests/matrix/record.py [VERSION ...]`.

Owns the files tests/contract/golden/*.json. Does not compare: tests/contract/test_golden.py does.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "matrix"), str(TESTS / "support"), str(TESTS.parent)]

from driver import CHUNK  # noqa: E402
from sdk_environments import VERSIONS, drive  # noqa: E402
from recording import Recorder, fixture  # noqa: E402
from server import TestServer  # noqa: E402

GOLDEN = TESTS / "contract" / "golden"
JSON_FLAGS = {"proto_write_fwdbwd": False, "fwd_via_fwdbwd": False, "create_model_via_load_weights": False}


def speaks_json(version: str) -> bool:
    """SDKs before 0.25 send training data as JSON unless the server's flags say otherwise."""
    return tuple(map(int, version.split("."))) < (0, 25)


def record(version: str, changed_flags: dict, target: Path) -> None:
    recorders = []

    def wrap(app):
        recorders.append(Recorder(app))
        return recorders[0]

    with tempfile.TemporaryDirectory() as folder:
        flags = {"fwdbwd_max_chunk_len": CHUNK, **changed_flags}
        server = TestServer(Path(folder), max_runs=10, changed_flags=flags, wrap=wrap)
        try:
            drive(version, server.url)
        finally:
            server.stop()
    lines = ",\n".join(json.dumps(exchange, separators=(",", ":")) for exchange in fixture(recorders[0].exchanges))
    target.write_text(f'{{"sdk": "{version}", "exchanges": [\n{lines}\n]}}\n')
    print(f"{target.name}: {target.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TINKER_API_KEY", "tml-test")
    GOLDEN.mkdir(exist_ok=True)
    for version in sys.argv[1:] or VERSIONS:
        record(version, {}, GOLDEN / f"{version}.json")
        if speaks_json(version):
            record(version, JSON_FLAGS, GOLDEN / f"{version}-json.json")
