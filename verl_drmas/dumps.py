"""The rollout dumps of a team's run (`trainer.rollout_data_dir/<step>.jsonl`): their format, and how they are read.

verl writes one JSON object a row, with `input`, `output`, `gts`, `score`, `step` and `uid` (`{prompt}_{session}_{n}`).
The team trainer adds `agent_id`, `model_id`, `index` and `acc`, where any row has them `failed` and `fault`, and the
column `drmas`, which is null on padding rows and an object on all others. Format 1 of that object:

| key | what |
|---|---|
| `format` | 1 |
| `path` | the activation's place in the workflow (`main/turn.0/call.1/finder`, or agent and number) |
| `activation` | its order in the session; a copy (`drmas.alignment.copies=physical`) has 1000000 or more |
| `valid` | false: an invalid action |
| `spans` | of `output`, in order: [1: sampled and in the loss, 0: observed or masked, tokens, characters] |
| `prompt_tokens` | length of `input` |
| `turns`, `versions` | LLM calls; oldest and newest weights that they came from |
| `reward` | the row's own; null if its session failed. In validation verl's `score` is that of the session's last row |
| `outcome` | the session's shared reward; null where there is none |
| `parts`, `counts` | the activation's own reward terms and numbers |
| `session` | the session's numbers, on its first row; else null |
| `told` | `parsed`, `calls` and `passages` of `rollout/told.py`, those that there are |

Rows that were trained on or enter the statistics also have, under `trained`:

| key | what |
|---|---|
| `position` | the row's place in the batch, padding left out: sums depend on the order in their last bits |
| `reward` | what the estimator was given, before any penalty; unlike `score` it has a KL term of the reward in it |
| `penalty` | of an invalid action |
| `advantage` | a float32: what each trained token got; a list, one a token, where they differ |
| `tokens` | how many tokens train |
| `copies` | how often `mgrpo` counts the row; null for other estimators |
| `weight` | the row's weight in the loss; null: none was written, or verl wrote one a token |
| `updated` | false: the agent is frozen or another job's. No row enters an update before `trainer.critic_warmup` |

And the file's first row of these has `settings`: all else that decides the step's advantages, see `STEP_SETTINGS`.
Dumps of validation have neither. The first row that isn't padding has `rows`, how many lines the file has: a run may be
about to write it, or have been killed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from verl_drmas.rollout.rows import FIRST_COPY

FORMAT = 1
COLUMN = "drmas"
CONTEXT = 16  # tokens; no character has as many
STEP_SETTINGS = (
    "estimator",  # algorithm.adv_estimator, after drmas.group_by
    "base_estimator",  # verl's estimator behind drmas.group_by=agent; else null
    "algorithm",  # the section `algorithm`, resolved
    "sessions",  # actor_rollout_ref.rollout.n
    "sessions_played",  # that the rows are of, also those without a row of this job's agents
    "section",  # of `drmas`: agents (model, trainable, invalid_penalty), models, advantage, group_by
    "alignment",  # of mgrpo: aligned, target, mode, seed, step; else null
    "copies",  # drmas.alignment.copies under mgrpo; else null
    "whole_team",  # false: the rows of one job of a pair, without those of the other job's agents
    "version",  # of verl-drmas
)


class DumpError(ValueError):
    """Dumps that can't be read or used; the message is one line that names the file and what to do."""


def spans_of(mask: Sequence[int], ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> list:
    """Which characters of a response were sampled.

    Args:
        mask: 1 for a sampled token, 0 for an observed one (tokens,).
        ids: The tokens (tokens,).
        text: All of them, decoded.
        decode: Decodes some of them as `text` was.

    Returns:
        [sampled, tokens, characters] of each run of equal masks. The tokens add up to those of the response and the
        characters to those of the text, also with tokenizers whose pieces don't add up to the whole.
    """
    runs = [(int(sampled), len(list(run))) for sampled, run in groupby(mask, key=bool)]
    if len(runs) == 1:
        return [[*runs[0], len(text)]]
    ends, end = [], 0
    for _, length in runs:
        ends.append(end := end + length)
    starts = [0, *ends[:-1]]
    pieces = [decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    if "".join(pieces) == text:
        sizes = [len(piece) for piece in pieces]
    else:  # a character of several tokens, or a tokenizer that treats a beginning otherwise
        marks, least, whole, before = [], 0, 0, 0
        for end in ends[:-1]:  # how much longer the text grows by a run, behind some tokens that were there before
            start = max(0, before - CONTEXT)
            whole += len(decode(ids[start:end])) - len(decode(ids[start:before]))
            least, before = max(least, min(len(text), whole)), end
            marks.append(least)
        marks = [0, *marks, len(text)]
        sizes = [after - before for before, after in pairwise(marks)]
    return [[sampled, tokens, size] for (sampled, tokens), size in zip(runs, sizes, strict=True)]


@dataclass(frozen=True)
class DumpedRow:
    """One real row of a dump.

    Attributes:
        line: As it stands in the file.
        file, number: Where that is.
    """

    line: Mapping[str, Any]
    file: Path
    number: int

    @cached_property
    def place(self) -> tuple[str, int, int]:
        """Prompt, session and number of the row in TransferQueue's key."""
        prompt, session, number = str(self.line["uid"]).rsplit("_", 2)
        return prompt, int(session), int(number)

    @property
    def own(self) -> Mapping[str, Any]:
        """The column `drmas`."""
        return self.line[COLUMN]

    @property
    def trained(self) -> Mapping[str, Any] | None:
        """What training made of it; None: a failed session's row, or one of validation."""
        return self.own.get("trained")

    @property
    def agent(self) -> str:
        return str(self.line["agent_id"])

    @property
    def copied(self) -> bool:
        """It repeats another row (`drmas.alignment.copies: physical`): trained on, but nobody acted."""
        return self.own["activation"] >= FIRST_COPY

    @property
    def reward(self) -> float | None:
        """The row's own, before penalties and KL terms; None: its session failed."""
        return self.own["reward"]

    @property
    def pieces(self) -> list[tuple[bool, str]]:
        """The response cut at its mask: (sampled, text)."""
        made, start = [], 0
        for sampled, _, size in self.own["spans"]:
            made.append((bool(sampled), self.line["output"][start : start + size]))
            start += size
        return made

    @property
    def mask(self) -> list[int]:
        """Response mask (tokens,)."""
        return [sampled for sampled, tokens, _ in self.own["spans"] for _ in range(tokens)]


@dataclass(frozen=True)
class DumpedStep:
    """One file.

    Attributes:
        file: Its path.
        step: The global step.
        rows: The real rows, as they stand in it: by prompt, session and activation.
        settings: What decided the step's advantages; None in validation.
    """

    file: Path
    step: int
    rows: tuple[DumpedRow, ...]
    settings: Mapping[str, Any] | None


def read_step(file: Path) -> DumpedStep:
    """Read a dump.

    Raises:
        DumpError: It is no dump of a team's run, of an older or newer verl-drmas, or cut.
    """
    rows = tuple(_rows(file))
    if not rows:
        raise DumpError(f"{file}: holds no row; give another step")
    settings = next((row.own["settings"] for row in rows if row.own.get("settings")), None)
    step = rows[0].line.get("step")
    return DumpedStep(file, int(step if step is not None else file.stem), rows, settings)


def newest_whole(files: Mapping[int, Path]) -> tuple[DumpedStep, str]:
    """Read what a run wrote last. The highest step may be one that is being written, or of an attempt that died before
    the run was resumed from an earlier step.

    Args:
        files: By step, at least one.

    Returns:
        The step, and in words why it.

    Raises:
        DumpError: None can be read; of the newest.
    """
    why: list[DumpError] = []
    for file in _newest_first(files):
        try:
            step = read_step(file)
        except DumpError as error:
            why.append(error)
        else:
            return step, "; written last" + (f" of those that can be read ({why[0]})" if why else "")
    raise why[0]


def _rows(file: Path) -> Iterator[DumpedRow]:
    number, promised = 0, None
    try:
        lines = file.open("rb")  # texts may hold other line breaks, and a cut may part a character
    except OSError as error:
        raise DumpError(f"{file}: {error.strerror or error}; give a run's trainer.rollout_data_dir") from None
    with lines:
        for number, text in enumerate(lines, start=1):
            where = f"{file}: line {number}"
            try:
                line = json.loads(text.decode("utf-8"))
            except ValueError as error:  # of the letters or of the JSON
                raise DumpError(f"{where} is not JSON ({error}); the file is cut or no dump: dump it again") from None
            if not isinstance(line, dict) or "uid" not in line:
                raise DumpError(f"{where} has no 'uid': not a dump of verl's; give a run's trainer.rollout_data_dir")
            if COLUMN not in line:
                raise DumpError(
                    f"{where} has no {COLUMN!r}: dumped by an older verl-drmas, or by no team's run. Run the step "
                    "again with this version (from a checkpoint before it), trainer.rollout_data_dir set"
                )
            own = line[COLUMN]
            if own is None:
                continue  # padding
            found = own.get("format") if isinstance(own, dict) else None
            if found != FORMAT:
                raise DumpError(f"{where} has format {found!r}, and this verl-drmas reads {FORMAT}; use the run's own")
            missing = [name for name in ("input", "output", "agent_id", "index") if name not in line]
            missing += [
                f"{COLUMN}.{name}" for name in ("path", "activation", "valid", "spans", "reward") if name not in own
            ]
            if missing:
                raise DumpError(f"{where} has no {missing[0]!r}: the dump was changed; take it as it was written")
            promised = own.get("rows", promised)
            yield DumpedRow(line, file, number)
    if promised is not None and number != promised:
        raise DumpError(f"{file}: has {number} of its {promised} rows; it is being written, or its run was killed then")


# What a run writes beside its logs and dumps, and what would take long to look through.
BESIDE = ("global_step_", "checkpoints", "wandb", "node_modules", "warm_start")
DEEPEST = 4  # folders below the one that is named


def find_dumps(run: Path) -> dict[int, Path]:
    """The files of a run's dumps by step.

    Args:
        run: The folder of the dumps, one file of it, or a run's folder with one such folder in it. Of several the one
            is taken whose rows were trained on; validation has none.

    Raises:
        DumpError: There is none, or more than one.
    """
    if run.is_file():
        if not run.stem.isdecimal() or run.suffix != ".jsonl":
            raise DumpError(f"{run}: not named <step>.jsonl; give a run's trainer.rollout_data_dir")
        return {int(run.stem): run}
    if not run.is_dir():
        raise DumpError(f"{run}: no such file or folder; give a run's trainer.rollout_data_dir")
    folders = {folder: files for folder, files in _folders(run, 0)}
    unread: list[DumpError] = []
    if len(folders) > 1:
        trained = {folder: files for folder, files in folders.items() if _was_trained(files, unread)}
        folders = trained or folders
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders)
        why = f" ({unread[0]})" if unread else ""
        raise DumpError(f"{run}: holds the dumps of several runs or jobs; name one of {names}{why}")
    if not folders:
        raise DumpError(f"{run}: no rollout dumps (<step>.jsonl); set trainer.rollout_data_dir in the run, and name it")
    (files,) = folders.values()
    return files


def listed(steps: Sequence[int]) -> str:
    """Steps in few words."""
    shown = ", ".join(map(str, steps[:8]))
    return f"{shown}, ... {steps[-1]}" if len(steps) > 8 else shown


def _folders(folder: Path, depth: int) -> Iterator[tuple[Path, dict[int, Path]]]:
    children = sorted(folder.iterdir())
    files = {int(c.stem): c for c in children if c.suffix == ".jsonl" and c.stem.isdecimal() and c.is_file()}
    if files:
        yield folder, dict(sorted(files.items()))
        return
    if depth < DEEPEST:
        for child in children:
            if child.is_dir() and not child.is_symlink() and not child.name.startswith((".", *BESIDE)):
                yield from _folders(child, depth + 1)


def _was_trained(files: Mapping[int, Path], unread: list[DumpError]) -> bool:
    """By the newest file that can be read; if none can, the newest one's error goes to `unread`."""
    errors = []
    for file in _newest_first(files):
        try:
            return any(row.trained for row in _rows(file))
        except DumpError as error:
            errors.append(error)
    unread += errors[:1]
    return False


def _newest_first(files: Mapping[int, Path]) -> list[Path]:
    steps = sorted(files, key=lambda step: (files[step].stat().st_mtime_ns, step), reverse=True)
    return [files[step] for step in steps]
