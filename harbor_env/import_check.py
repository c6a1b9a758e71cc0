"""Says which versions the control environment has, as JSON; ends with status 1 when something of it cannot be imported.

Owns the list of what a run imports. Does not install anything.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from importlib.metadata import version

PARTS = {"tinker": "tinker", "tinker_cookbook.renderers": "tinker-cookbook", "rock.sdk.sandbox.client": "rl-rock"}


def main() -> int:
    found, failed = {"python": platform.python_version()}, {}
    for module, package in PARTS.items():
        try:
            importlib.import_module(module)
            found[package] = version(package)
        except Exception as error:  # Whatever a package raises at its import is the finding.
            failed[module] = f"{type(error).__name__}: {error}"
    print(json.dumps({"versions": found, "failed": failed, "ok": not failed}, indent=2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
