"""Lends the contract tests' fixtures to those that still lie here."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("contract_fixtures", Path(__file__).parents[1] / "contract" / "conftest.py")
_contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_contract)
for _name in ("start_server", "server", "connect", "client", "training", "raw"):
    globals()[_name] = getattr(_contract, _name)
