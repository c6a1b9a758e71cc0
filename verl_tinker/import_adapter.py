"""Makes a checkpoint of a PEFT adapter that was trained elsewhere; the server may run meanwhile.

Owns the command line. Does not make a sampler checkpoint: only a trainer can say which log-probabilities the weights
must give, so a client resumes from the path and calls save_weights_for_sampler.

    python -m verl_tinker.import_adapter ./my-adapter --name first --config configs/quick_start/cpu.yaml
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import time
from pathlib import Path

from verl_tinker.checks import check_checkpoint_dir
from verl_tinker.config import Config, add_arguments, load_config
from verl_tinker.core import disk
from verl_tinker.core.checkpoints import Checkpoint, CheckpointPath, RunRecord, check_name
from verl_tinker.core.errors import TinkerError, UserError
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import ModelSpec
from verl_tinker.models import ModelError, resolve_model
from verl_tinker.schema import ConfigError


def import_adapter(
    folder: Path, store: CheckpointStore, base_model: str, model_folder: Path, name: str, owner: str = ""
) -> tuple[Checkpoint, list[str]]:
    """The new checkpoint, and the modules that were added to the adapter (see `read_adapter`)."""
    from verl_tinker.engine.peft_folder import read_adapter

    path = CheckpointPath(f"imported-{secrets.token_hex(8)}:train:0", "weights", check_name(name))
    adapter, added = read_adapter(folder, model_folder)
    spec, now = ModelSpec(base_model, adapter.spec), time.time()
    store.require_bytes(sum(p.numel() * p.element_size() for p in adapter.parameters().values()), f"importing {path}")
    scratch = store.scratch()
    try:
        with disk.explained(store.root, str(path)):
            adapter.save(scratch, base_model)
        store.record_run(RunRecord(path.run_id, spec, now, {"imported_from": folder.name}, owner))
        return store.publish(scratch, Checkpoint(secrets.token_hex(8), path, spec, now, owner=owner)), added
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _base_model(folder: Path, wanted: str | None, config: Config) -> str:
    from verl_tinker.engine.peft_folder import base_model_of

    name = wanted or base_model_of(folder)
    if not isinstance(name, str) or name not in config.models:
        raise UserError(
            f"the adapter's base model is {name!r} and the preset serves {', '.join(config.models)}; give --config for "
            "the preset that serves it, or --base-model when it goes by another name there"
        )
    return config.models.listed(name)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl_tinker.import_adapter", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("--name", required=True, help="the checkpoint's name, the last part of its path")
    parser.add_argument("--base-model", help="the public name of its base model here, where the adapter gives another")
    parser.add_argument("--checkpoint-dir", type=Path, help="instead of the preset's server.checkpoint_dir")
    parser.add_argument("--owner", default="", help="the name of the API key that it will belong to")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        base_model = _base_model(options.folder, options.base_model, config)
        model_folder = resolve_model(config.models[base_model], config.cache_dir)
        root = (options.checkpoint_dir or config.checkpoint_dir).expanduser()
        check_checkpoint_dir(root)
        store = CheckpointStore(root, recover=False)
        try:
            checkpoint, added = import_adapter(
                options.folder, store, base_model, model_folder, options.name, options.owner)
        finally:
            store.close()
    except (TinkerError, ConfigError, ModelError) as error:
        sys.exit(str(error))
    if added:
        print(f"Added with B zero, because they are trained together with the adapter's own: {', '.join(added)}",
              file=sys.stderr)
    print(checkpoint.path)


if __name__ == "__main__":
    main()
