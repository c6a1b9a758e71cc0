"""The quick start's commands: prepare-sandbox, configure, serve and run.

Owns which command is which. Each lives in a module of its own.

    python -m harbor_env run rollout --task-id sympy__sympy-19637
"""

from __future__ import annotations

import argparse
import sys

from harbor_env import client, configure, prepare_sandbox, run, serve
from harbor_env.errors import SettingError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harbor_env", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, text in (
        ("prepare-sandbox", prepare_sandbox, "fetch a task, and make the outer image"),
        ("configure", configure, "write the four files"), ("serve", serve, "run ROCK's worker or admin in the foreground"),
        ("run", client, "play and train")):
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__.splitlines()[0]))
    options = parser.parse_args(arguments)
    try:
        if options.command == "run":
            return run.main(options, arguments[1:])
        return {"prepare-sandbox": prepare_sandbox, "configure": configure, "serve": serve}[options.command].main(options)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
