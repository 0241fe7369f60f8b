"""Answers of a finished evaluation, judged by a model: which are right, per benchmark and per group of its questions.

The sessions are those of `verl-drmas eval`, played once and judged as often as one likes. Each verdict is on the disk
at once; an answer that couldn't be judged is neither right nor wrong, and is asked about again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_drmas.evaluation.journal import Journal, digest
from verl_drmas.evaluation.results import Asked, Place
from verl_drmas.evaluation.rows import Rows
from verl_drmas.evaluation.score import Score, macro_average, score_source
from verl_drmas.evaluation.workers import work_off
from verl_drmas.evaluation.workflow import task_of
from verl_drmas.rewards.answer_rubric import ANSWER_RUBRIC
from verl_drmas.rewards.judge import Judge, JudgeRequest

JUDGED, MATCHED = "judged", "exact match"
GIVE_UP = 8  # judgements in a row that servers failed


class JudgeSilent(RuntimeError):
    """Servers failed so many judgements in a row that they would fail more."""


@dataclass(frozen=True)
class Played:
    """The sessions of an evaluation.

    Attributes:
        ended: Those that came to an end, by place.
        failed: Those that only failed so far.
        asked: All that were asked for, by any of the commands that wrote the file; not all need have been played.
    """

    ended: dict[Place, dict[str, Any]]
    failed: frozenset[Place]
    asked: frozenset[Place]

    @property
    def missing(self) -> int:
        """How many that were asked for didn't come to an end."""
        return len(self.asked - self.ended.keys())


def read_sessions(path: Path, rows: Rows) -> Played:
    """The sessions of a file. One of an earlier version, which doesn't say what was asked for, is taken as if it were
    all rows, in as many runs and samples as it has.

    Args:
        path: As `verl-drmas eval` wrote it; another process may still be writing.
        rows: The data that it was given.

    Raises:
        ValueError: It is no such file, or was played on other data.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}); give the --output of verl-drmas eval") from error
    whole = content.rpartition(b"\n")[0]  # without a line that is being written
    lines = []
    for number, text in enumerate(whole.split(b"\n"), start=1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number} is no JSON ({error}); give the --output of verl-drmas eval"
            ) from None
    measured = lines[0].get("measured") if isinstance(lines[0], dict) else None
    if not isinstance(measured, dict) or "data" not in measured:
        raise ValueError(f"{path}: is no file of sessions; give the --output of verl-drmas eval")
    order = measured.get("order of data", [*measured["data"]])  # a row's number counts over all files
    if measured["data"] != rows.files or order != [*rows.files]:
        was = _named({name: measured["data"].get(name) for name in order})
        raise ValueError(
            f"{path}: was played on {was}, and the data given is {_named(rows.files)}; give the same files, in the "
            "same order"
        )
    ended, failed, asked = {}, set(), set()
    sources = rows.sources
    for number, line in enumerate(lines[1:], start=2):
        if "weights" in line:
            continue
        place = Place(line["run"], line["row"], line["session"])
        of = line.get("asked") or {"rows": len(rows.rows), "samples": place.session + 1, "runs": place.run + 1}
        asked.add(Asked(**of))
        if line["success"] is None:
            failed.add(place)
        else:
            source = sources[line["row"]] if line["row"] < len(sources) else None
            if line["data_source"] != source:
                raise ValueError(
                    f"{path}: line {number} is of row {line['row']} of {line['data_source']!r}, which in the data "
                    f"given is of {source!r}; give the files that it was played on"
                )
            ended[place] = line
    if not ended:
        raise ValueError(f"{path}: no session came to an end; go on with verl-drmas eval")
    return Played(ended, frozenset(failed - ended.keys()), frozenset().union(*asked))


class Verdicts:
    """A file of verdicts.

    Args:
        path: The file; made where there is none.
        judge: Name of the judging model; verdicts of another one are refused.
        rows: The data; verdicts on other questions or golds are refused.

    Raises:
        ValueError: As `Journal` says it.
    """

    def __init__(self, path: Path, judge: str, rows: Rows):
        header = {"judge": judge, "rubric": digest([ANSWER_RUBRIC]), **rows.measured()}
        self.journal = Journal(path, header)
        self._of = {self._key(line): float(line["right"]) for line in self.journal.lines}

    def get(self, session: Mapping[str, Any]) -> float | None:
        """1 right, 0 wrong, None: not judged yet. A session without an answer is wrong without being asked about."""
        return 0.0 if session["answer"] is None else self._of.get(self._key(session))

    def add(self, session: Mapping[str, Any], right: float, reason: str) -> None:
        """Keep a verdict, on the disk when this returns."""
        line = {key: session[key] for key in ("run", "row", "session", "data_source", "answer")}
        self.journal.add({**line, "right": right, "reason": reason})
        self._of[self._key(session)] = right

    def close(self) -> None:
        """Close the file."""
        self.journal.close()

    def __enter__(self) -> Verdicts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
        return line["run"], line["row"], line["session"], str(line["answer"])


def judge_sessions(
    sessions: Mapping[Place, Mapping[str, Any]],
    rows: Rows,
    judge: Judge,
    verdicts: Verdicts,
    *,
    concurrency: int,
    on_end: Callable[[bool], None] = lambda judged: None,
) -> int:
    """Judge the answers that have no verdict yet.

    Args:
        sessions: By place.
        rows: The data.
        judge: Who judges; it is closed afterwards.
        verdicts: Where verdicts go.
        concurrency: Judgements at once.
        on_end: Is told of each judgement whether there was one.

    Returns:
        How many answers could not be judged.

    Raises:
        JudgeSilent: Servers failed `GIVE_UP` in a row. Verdicts are kept. An answer that a judge that is there has no
            verdict on doesn't count: a file may have nothing else left.
    """
    waiting = [line for _, line in sorted(sessions.items()) if verdicts.get(line) is None]
    failed = in_a_row = 0

    async def judge_one(line: Mapping[str, Any]) -> None:
        nonlocal failed, in_a_row
        task = task_of(rows.rows[line["row"]], line["session"])
        asked = JudgeRequest(task.question, "", result=str(line["answer"]), gold=task.answer)
        judgement = await judge.score(asked)
        judged = judgement.score is not None
        if judged:
            verdicts.add(line, judgement.score, judgement.reason)
        failed, in_a_row = failed + (not judged), in_a_row + 1 if judgement.outage else 0
        on_end(judged)
        if in_a_row >= GIVE_UP:
            raise JudgeSilent(f"{in_a_row} judgements in a row failed; the last: {judgement.reason}")

    async def whole() -> None:
        try:
            await work_off(waiting, judge_one, concurrency)
        finally:
            await judge.close()

    asyncio.run(whole())
    return failed


def summarise(
    played: Played,
    rows: Rows,
    verdicts: Verdicts,
    groups: Sequence[str] = ("level", "type"),
) -> dict[str, Any]:
    """Shares of right answers per data source and per group of its questions, as plain data.

    Args:
        played: The sessions.
        rows: The data.
        verdicts: Of the sessions.
        groups: Fields of `extra_info` whose values make groups; a source whose rows have just one value has none.

    Returns:
        `runs`, `samples`, `sources` (for each `judged` and `exact match` as `score.Score` has it, `prompts`, sessions
        that were `asked` for, `ended` and `failed`, those without an answer and those not judged; groups are named
        `source, level 1`), `macro_average`. Scores are of the sessions that ended.
    """
    runs = 1 + max(place.run for place in played.asked)
    samples = 1 + max(place.session for place in played.asked)
    parts: dict[str, set[int]] = {}  # numbers of rows
    sources = rows.sources
    asked = sorted({place.row for place in played.asked})
    wholes = list(dict.fromkeys(sources[number] for number in asked))
    several = {(source, key): len(values) > 1 for source, key, values in _values(rows, groups)}
    for source in wholes:
        mine = [number for number in asked if sources[number] == source]
        parts[source] = set(mine)
        for key in groups:
            if not several[source, key]:
                continue
            for value in sorted({_value(rows, number, key) for number in mine}):
                parts[f"{source}, {key} {value}"] = {n for n in mine if _value(rows, n, key) == value}
    ended = sorted(played.ended.items())
    blocks = {name: [(place, line) for place, line in ended if place.row in part] for name, part in parts.items()}
    scored = {name: _scores(block, verdicts, runs, samples) for name, block in blocks.items()}
    measured = [scored[name] for name in wholes]
    macro = macro_average(measured) if len(measured) > 1 else {}
    return {
        "runs": runs,
        "samples": samples,
        "sources": {
            name: {
                "prompts": len({place.row for place, _ in block}),
                "asked": sum(place.row in parts[name] for place in played.asked),
                "ended": len(block),
                "failed": sum(place.row in parts[name] for place in played.failed),
                "without_answer": sum(line["answer"] is None for _, line in block),
                "not_judged": sum(verdicts.get(line) is None for _, line in block),
                "scores": {key: asdict(score) for key, score in scored[name].items()},
            }
            for name, block in blocks.items()
        },
        "macro_average": {key: asdict(score) for key, score in macro.items()},
    }


def _scores(
    block: Sequence[tuple[Place, Mapping[str, Any]]], verdicts: Verdicts, runs: int, samples: int
) -> dict[str, Score]:
    """By name; one that no session has is left out."""
    right: dict[str, list[dict[int, list[float]]]] = {name: [{} for _ in range(runs)] for name in (JUDGED, MATCHED)}
    for place, line in block:
        for name, value in ((JUDGED, verdicts.get(line)), (MATCHED, line["success"])):
            if value is not None:
                right[name][place.run].setdefault(place.row, []).append(value)
    found = {name: score_source(each, samples, ()) for name, each in right.items()}
    return {name: score[f"avg@{samples}"] for name, score in found.items() if score}


def _values(rows: Rows, groups: Sequence[str]) -> list[tuple[str, str, set[str]]]:
    """Of each source and group, the values that its questions have."""
    found: dict[tuple[str, str], set[str]] = {}
    for number, source in enumerate(rows.sources):
        for key in groups:
            found.setdefault((source, key), set()).add(_value(rows, number, key))
    return [(source, key, values) for (source, key), values in found.items()]


def _value(rows: Rows, number: int, key: str) -> str:
    value = rows.rows[number]["extra_info"].get(key)
    return "unknown" if value is None else str(value)


def _named(files: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({content})" for name, content in files.items())
