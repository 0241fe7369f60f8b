"""What an earlier start left, out of the way of the next one."""

from __future__ import annotations

from pathlib import Path


def keep_aside(path: Path) -> None:
    """Rename what the next start would overwrite or go on with; where there is nothing, do nothing.

    Args:
        path: A file, `metrics.jsonl`, becomes `metrics.1.jsonl`, then `.2`, ...; a folder, `cpu_pair`, `cpu_pair.1`.
    """
    if not path.exists():
        return
    name, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (aside := path.with_name(f"{name}.{number}{suffix}")).exists():
        number += 1
    path.rename(aside)
