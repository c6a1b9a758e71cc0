"""Makes, lists and removes API keys.

Owns the command line. Does not check keys: `verl_tinker.core.access` does.

    python -m verl_tinker.keys add alice --file keys.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_tinker.core.access import Keys
from verl_tinker.core.errors import UserError


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl_tinker.keys", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["add", "list", "remove"])
    parser.add_argument("name", nargs="?", help="whose key; runs and checkpoints belong to this name")
    parser.add_argument("--file", type=Path, required=True, help="the preset's server.api_keys_file")
    options = parser.parse_args(arguments)
    try:
        keys = Keys(options.file.expanduser())
        if options.action == "list":
            print("\n".join(keys.names()))
        elif not options.name:
            parser.error(f"{options.action} needs a name")
        elif options.action == "add":
            print(keys.add(options.name))
        else:
            keys.remove(options.name)
    except (UserError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
