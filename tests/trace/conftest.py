"""Dumps for the tests of pages and of replays, written by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for made_dumps
