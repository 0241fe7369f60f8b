"""Where a file lies."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
# Processes on several machines see these; SQLite's write-ahead log needs memory that all its users share.
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs")


def network_disk(path: Path) -> str | None:
    """Kind of the network file system that holds `path`; None: it is a local disk, or nobody knows."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:  # no Linux
        return None
    best, kind = -1, None
    for line in lines:
        _, place, found, *_ = line.split()
        place = place.encode().decode("unicode_escape")  # a blank is \040
        if path.absolute().is_relative_to(place) and len(place) >= best:
            best, kind = len(place), found
    known = kind is not None and (kind in NETWORK or kind.startswith("fuse."))
    return kind if known else None
