"""What retrievers count between two reports."""

from __future__ import annotations


def no_counts() -> dict[str, float]:
    """Calls, retries, outages, rejected queries, and seconds of all calls together; all at zero."""
    return dict.fromkeys(("calls", "retries", "outages", "rejected", "seconds"), 0.0)
