"""Jobs without a cluster, as the trainer's tests have them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))  # for recorded_jobs and sample_store

from sample_store import queue  # noqa: F401
