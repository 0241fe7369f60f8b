"""Prompts by how often a team solves them: success rates of sessions, and the rows within a band of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_drmas.data.parquet import check_indices, check_prompts, whole_file
from verl_drmas.evaluation.journal import Journal, digest, short

RATE, SESSIONS = "success_rate", "sessions"


@dataclass
class Tally:
    """A prompt's sessions.

    Attributes:
        successes: Of each session that ended, by what identifies it; 1.0 or 0.0, or a reward.
        failed: Sessions without an outcome: neither right nor wrong.
    """

    successes: dict[Any, float] = field(default_factory=dict)
    failed: int = 0

    @property
    def rate(self) -> float | None:
        """Mean over the sessions that ended; None: none did."""
        return sum(self.successes.values()) / len(self.successes) if self.successes else None


@dataclass(frozen=True)
class Band:
    """The rows that are kept.

    Attributes:
        low, high: The band of success rates, inclusive.
        samples: A prompt with fewer ended sessions is not measured.
        keep_unmeasured: Keep those too.
    """

    low: float
    high: float
    samples: int
    keep_unmeasured: bool = False

    def __post_init__(self):
        if not self.low <= self.high:
            raise ValueError(f"--low {self.low} is above --high {self.high}; no rate is in that band")
        if self.samples < 1:
            raise ValueError(f"--samples is {self.samples}; a rate needs at least 1 session")

    def keeps(self, tally: Tally) -> bool:
        """Whether a prompt is kept."""
        if len(tally.successes) < self.samples:
            return self.keep_unmeasured
        # A mean of thirds is not exactly the third that a user writes.
        return self.low - 1e-9 <= tally.rate <= self.high + 1e-9


@dataclass(frozen=True)
class Kept:
    """What a filter did.

    Attributes:
        rows: Prompts that were looked at.
        kept: Of them, those that were written.
        below, above: Measured prompts on either side of the band.
        unmeasured: Indices of prompts with too few ended sessions.
        failed: Sessions without an outcome.
    """

    rows: int
    kept: int
    below: int
    above: int
    unmeasured: list[int]
    failed: int


def read_prompts(path: Path, *, needs_answer: bool = True) -> pa.Table:
    """A prompt file with all its columns, checked.

    Args:
        path: The file.
        needs_answer: Whether every row needs a gold.

    Raises:
        ValueError: One line on what is wrong with it.
    """
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: give a parquet file, as `verl-drmas data` writes them")
    check_prompts(path, needs_answer=needs_answer)
    check_indices([path])
    return pq.read_table(path)


def indices_of(table: pa.Table) -> list[int]:
    """`extra_info.index` of each row."""
    return [info["index"] for info in table["extra_info"].to_pylist()]


def write_band(table: pa.Table, tallies: Mapping[int, Tally], band: Band, output: Path) -> Kept:
    """Write the rows within the band, each with its rate and number of ended sessions in `extra_info`.

    Args:
        table: All prompts.
        tallies: Their sessions, by index.
        band: What is kept.
        output: The file.

    Raises:
        ValueError: No row is in the band; nothing is written.
    """
    infos = table["extra_info"].combine_chunks()
    mine = [tallies.get(index, Tally()) for index in indices_of(table)]
    keep = [band.keeps(tally) for tally in mine]
    measured = [tally.rate for tally in mine if len(tally.successes) >= band.samples]
    kept = Kept(
        rows=len(mine),
        kept=sum(keep),
        below=sum(rate < band.low - 1e-9 for rate in measured),
        above=sum(rate > band.high + 1e-9 for rate in measured),
        unmeasured=[i for i, t in zip(indices_of(table), mine, strict=True) if len(t.successes) < band.samples],
        failed=sum(tally.failed for tally in mine),
    )
    if not kept.kept:
        raise ValueError(
            f"no prompt has a success rate from {band.low:g} to {band.high:g} ({kept.below} below, {kept.above} above, "
            f"{len(kept.unmeasured)} not measured); nothing written"
        )
    numbers = {
        RATE: pa.array([tally.rate for tally in mine], pa.float64()),
        SESSIONS: pa.array([len(tally.successes) for tally in mine], pa.int64()),
    }
    fields = {f.name: infos.field(i) for i, f in enumerate(infos.type)} | numbers
    struct = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    table = table.set_column(table.column_names.index("extra_info"), "extra_info", struct).filter(pa.array(keep))
    with whole_file(output) as partial:
        pq.write_table(table, partial)
    return kept


# -- sessions that are played for it


class Played:
    """The ended and failed sessions of a measurement, kept in a file so that nothing is played twice.

    Args:
        path: The file.
        measured: Prompts, workflow, model and sampling; not how many sessions, nor which band is kept.

    Raises:
        ValueError: The file holds sessions of something else.
    """

    def __init__(self, path: Path, measured: dict[str, Any]):
        self._journal = Journal(path, measured)
        self.path = path
        self.tallies: dict[int, Tally] = {}
        for line in self._journal.lines:
            if line["success"] is not None:  # failed ones are played again
                self.tallies.setdefault(line["index"], Tally()).successes[line["session"]] = line["success"]

    def open_sessions(self, indices: Iterable[int], samples: int) -> list[tuple[int, int]]:
        """(index, session) of what is left to play; failed sessions are played again."""
        return [
            (index, session)
            for index in indices
            for session in range(samples)
            if index not in self.tallies or session not in self.tallies[index].successes
        ]

    def add(self, index: int, session: int, success: float | None, failed: str = "", detail: str = "") -> None:
        """Note a session; `success` is None where it failed."""
        tally = self.tallies.setdefault(index, Tally())
        line = {"index": index, "session": session, "success": success}
        if success is None:
            tally.failed += 1
            line |= {"failed": failed, "detail": detail[:300]}
        else:
            tally.successes[session] = success
        self._journal.add(line)

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# -- sessions of a run


def tallies_of_run(folder: Path, golds: Mapping[int, Any], until_step: int | None = None) -> dict[int, Tally]:
    """Sessions from a run's rollout dumps (`trainer.rollout_data_dir`), by prompt.

    A session's success is its `acc`, the team's outcome; a row's `score` is its own agent's reward and is not used.

    Args:
        folder: With `<step>.jsonl` files.
        golds: Gold of each prompt, by index; a dump of other prompts is refused by them.
        until_step: Last step to read; None: all.

    Raises:
        ValueError: One line on a dump that is missing, of another kind or of other prompts.
    """
    files = sorted((int(file.stem), file) for file in folder.glob("*.jsonl") if file.stem.isdecimal())
    files = [(step, file) for step, file in files if until_step is None or step <= until_step]
    if not files:
        upto = f" up to step {until_step}" if until_step is not None else ""
        raise ValueError(f"{folder}: no rollout dumps{upto} (<step>.jsonl); give the run's trainer.rollout_data_dir")
    tallies: dict[int, Tally] = {}
    failures: Counter[int] = Counter()
    for step, file in files:
        seen: set[str] = set()
        for number, row in _dumped(file):
            session = str(row["uid"]).rpartition("_")[0]  # {prompt}_{session}_{activation}
            index = row["index"]
            if session in seen or index not in golds:
                continue
            seen.add(session)
            if digest([row.get("gts")]) != digest([golds[index]]):
                raise ValueError(
                    f"{file}: line {number}: prompt {index} has the gold {short(row.get('gts'))}, in the prompt file "
                    f"{short(golds[index])}; give the file that the run was trained on"
                )
            if row.get("failed"):
                failures[index] += 1
            elif row["acc"] is not None:
                tallies.setdefault(index, Tally()).successes[step, session] = float(row["acc"])
    for index, count in failures.items():
        tallies.setdefault(index, Tally()).failed = count
    return tallies


def _dumped(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}: line {number} is not a JSON object ({error.msg})") from error
            missing = [name for name in ("uid", "index", "acc") if name not in row]
            if missing:
                raise ValueError(
                    f"{file}: line {number} has no {missing[0]!r}: not a dump of a team's run, or of an older "
                    "verl-drmas; measure with --url and --model instead"
                )
            yield number, row
