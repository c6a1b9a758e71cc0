"""The import rules of the house, read from the sources."""

import ast
from pathlib import Path

import pytest

import verl_tinker

ROOT = Path(verl_tinker.__file__).parent
HTTP = {"fastapi", "starlette", "uvicorn", "pydantic", "httpx"}
HEAVY = {"ray", "torch", "verl", "vllm", "transformers"}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    "part, top_level, ours",
    [
        ("core", HTTP | HEAVY | {"google", "tinker", "zstandard"}, {"verl_tinker.api"}),
        ("api", HEAVY, {"verl_tinker.engine"}),
        ("engine", {"fastapi", "starlette", "uvicorn"}, {"verl_tinker.api"}),
    ],
)
def test_who_may_import_what(part, top_level, ours):
    for file in (ROOT / part).rglob("*.py"):
        names = imports(file)
        assert not {name.split(".")[0] for name in names} & top_level, file
        assert not [name for name in names if any(name == o or name.startswith(f"{o}.") for o in ours)], file


def test_the_core_sees_only_the_protocol_of_the_engine():
    for file in (ROOT / "core").rglob("*.py"):
        seen = {name for name in imports(file) if name.startswith("verl_tinker.engine.")}
        assert seen <= {"verl_tinker.engine.base", "verl_tinker.engine.base.Engine"}, file


def test_no_pickle_is_ever_read():
    """Checkpoints come from users: safetensors and JSON hold no code."""
    loaders = {"torch.load", "pickle.load", "pickle.loads", "joblib.load", "numpy.load", "np.load", "yaml.load"}
    for file in ROOT.rglob("*.py"):
        assert not imports(file) & {"pickle", "cloudpickle", "dill", "joblib"}, file
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)}
        assert not calls & loaders, file
