"""verl's sample store for every test here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for recorded_jobs and sample_store

sys.path.insert(0, str(Path(__file__).parents[1]))  # for metric_page

from sample_store import queue  # noqa: F401
