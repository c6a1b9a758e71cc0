"""The command `python -m verl_tinker.plan`: who gets which GPUs of a preset, what lies in their memory, and does it fit?

Owns the command line. What it says is `report`'s.

    python -m verl_tinker.plan --config configs/distill/multi_teacher.yaml --gpus-per-node 8 --gpu-memory-gb 80
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from verl_tinker.config import Config, add_arguments, load_config
from verl_tinker.models import ModelError
from verl_tinker.plan.report import LORA_RANK, Cluster, report, text
from verl_tinker.schema import ConfigError


def _descriptions(config: Config, given: list[str]) -> dict[str, Path]:
    """`NAME=FOLDER`, or `FOLDER` for the trained model."""
    found = {}
    for argument in given:
        name, equals, folder = argument.rpartition("=")
        path = Path(folder).expanduser()
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model-config {argument}: there is no {path / 'config.json'}")
        found[name if equals else config.models[config.server.model_name]] = path
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl_tinker.plan", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--gpus-per-node", type=int, default=Cluster.gpus_per_node, metavar="N", help="default %(default)s")
    parser.add_argument("--gpu-memory-gb", type=float, default=Cluster.gpu_gib, metavar="G", help="GiB, default %(default)s")
    parser.add_argument("--nodes", type=int, metavar="N", help="default: as few as suffice")
    parser.add_argument("--lora-rank", type=int, default=LORA_RANK, metavar="R", help="of the runs, default %(default)s")
    parser.add_argument("--model-config", action="append", default=[], metavar="[NAME=]FOLDER",
                        help="a folder with the config.json of the trained model, or of the one that the preset calls NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        cluster = Cluster(options.gpus_per_node, options.gpu_memory_gb, options.nodes)
        result = report(config, cluster, _descriptions(config, options.model_config), options.lora_rank)
    except (ConfigError, ModelError) as error:
        sys.exit(str(error))
    print(json.dumps(result.tree(), indent=1) if options.json else text(result))
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
