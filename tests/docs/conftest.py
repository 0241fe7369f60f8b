"""The pages, what other tests share, and one composed configuration of verl's."""

import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "docs"), str(TESTS), str(TESTS / "store")]

from doc_config import composed  # noqa: E402

_spec = importlib.util.spec_from_file_location("evaluation_conftest", TESTS / "evaluation/conftest.py")
_evaluation = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_evaluation)
serve = _evaluation.serve  # a fixture: servers of chat completions


@pytest.fixture(scope="session")
def verl_config():
    """What verl has under a team that may be anything."""
    return composed("+drmas=base")
