"""Runs a function of the cookbook's library by its own configuration object, where no recipe has a command line for it.

Owns nothing of the training: chz builds the function's one argument from the flags, as the recipes' command lines do.

    .client-venv/bin/python client_examples/library.py tinker_cookbook.distillation.train_off_policy:main --help
"""

from __future__ import annotations

import asyncio
import pkgutil
import sys

import chz

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: library.py MODULE:FUNCTION [FLAG=VALUE ...]")
    asyncio.run(chz.nested_entrypoint(pkgutil.resolve_name(sys.argv[1]), argv=sys.argv[2:]))
