"""Builds the configuration of each command line on standard input, as the recipe would, and runs none.

Owns nothing; started with the client's environment. Prints one JSON object a line: the fields that were read, as text.

    .client-venv/bin/python tests/support/read_flags.py < LINES_OF_JSON_LISTS
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys

import chz


def read(arguments: list[str]) -> dict[str, str]:
    """`arguments`: what follows the interpreter, `-m MODULE FLAG...` or `library.py MODULE:FUNCTION FLAG...`."""
    first, module, *flags = arguments
    if first == "-m":
        target = importlib.import_module(module).CLIConfig
    else:
        target = chz.get_nested_target(pkgutil.resolve_name(module))
    config = chz.Blueprint(target).make_from_argv(flags)
    return {name: str(getattr(config, name)) for name in config.__chz_fields__}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(read(json.loads(line))))
