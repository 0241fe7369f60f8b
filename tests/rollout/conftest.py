"""Makes the checkout's `recipes` importable, which no installation ships: the team tests use their tokenizer."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
