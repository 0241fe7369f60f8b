"""The pages, and what `tests` shares."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "docs"), str(TESTS), str(TESTS / "store")]
