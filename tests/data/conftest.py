"""Where the real benchmark files are."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def math_files() -> Path:
    """Folder of the published math files: `bench/{aime,amc,math,minerva,olympiad_bench}.json`, `gsm8k_*_part.jsonl`."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("VERL_DRMAS_TEST_DATA", beside)) / "math"
    if not folder.is_dir():
        pytest.skip(f"real benchmark files not found in {folder}: set VERL_DRMAS_TEST_DATA")
    return folder
