"""A step's sessions as what a page shows: who said what, and what it earned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from verl_drmas.dumps import DumpedRow, DumpedStep
from verl_drmas.trace.choose import Chosen, many

HUES = 8  # colours of agents


@dataclass
class Piece:
    """A run of a response, and the activations that it called."""

    sampled: bool
    text: str
    calls: list[Activation] = field(default_factory=list)


@dataclass
class Activation:
    """One card.

    Attributes:
        row: The dump's.
        agent: Number of its agent on the page.
        chips: Short words with a tone (`good`, `bad`, `quiet`, ``).
        reward, advantage: Of the filters; None where there is none.
        pieces: Of its response.
        numbers: Everything else that has a number.
    """

    row: DumpedRow
    agent: int
    chips: list[tuple[str, str]]
    reward: float | None
    advantage: float | None
    pieces: list[Piece]
    numbers: list[tuple[str, str]]

    @property
    def told(self) -> Mapping[str, Any]:
        """`parsed`, `calls` and `passages`."""
        return self.row.own.get("told") or {}


@dataclass
class Session:
    """One column: a session's cards, those that were called inside those that called them."""

    number: int
    chips: list[tuple[str, str]]
    numbers: list[tuple[str, str]]
    activations: list[Activation]
    count: int


@dataclass
class Prompt:
    """The sessions of one prompt."""

    index: int
    gold: str | None
    sessions: list[Session]


@dataclass
class View:
    """A page.

    Attributes:
        step: The global step.
        facts: Of the step, by name.
        agents: Their names; a page calls them by number.
        table: Per agent, over the whole step: activations, sessions, reward, |advantage|, invalid ones, sampled tokens.
        prompts: What is shown.
        count: Activations shown, without copies.
    """

    step: int
    facts: list[tuple[str, str]]
    agents: list[str]
    table: list[list[str]]
    prompts: list[Prompt]
    count: int


def view_of(step: DumpedStep, chosen: Chosen) -> View:
    """Make the page's content.

    Args:
        step: The dump.
        chosen: Which sessions of it are shown.
    """
    configured = step.settings["section"]["agents"] if step.settings else {}
    agents = list(dict.fromkeys([*configured, *(row.agent for row in step.rows)]))
    prompts = [
        Prompt(
            index,
            _gold(rows=[row for own in sessions.values() for row in own]),
            [_session(number, rows, agents) for number, rows in sessions.items()],
        )
        for (index, _), sessions in chosen.sessions.items()
    ]
    count = sum(session.count for prompt in prompts for session in prompt.sessions)
    return View(step.step, _facts(step, chosen), agents, _table(step, agents), prompts, count)


def _facts(step: DumpedStep, chosen: Chosen) -> list[tuple[str, str]]:
    facts = [("shown", chosen.how)]
    if step.settings:
        estimator = step.settings["base_estimator"] or step.settings["estimator"]
        facts.append(("estimator", f"{estimator}{' by agent' if step.settings['base_estimator'] else ''}"))
        if alignment := step.settings["alignment"]:
            targets = ", ".join(f"D = {d} for {agent}" for agent, d in alignment["target"].items())
            facts.append(("alignment", f"{step.settings['copies']}, {alignment['mode']}, {targets}"))
        if not step.settings["whole_team"]:
            facts.append(("job", "one of a pair; the other agents' rows are in the other job's dumps"))
    else:
        facts.append(("advantages", "none: nothing was trained on these rows"))
    failed = {row.place[:2] for row in step.rows if row.line.get("failed")}
    if failed:
        facts.append(("failed", f"{many(len(failed), 'session')} of the step, whose rows nothing trained on"))
    return facts


def _gold(rows: Sequence[DumpedRow]) -> str | None:
    gold = rows[0].line.get("gts")
    return None if gold is None else str(gold)


def _session(number: int, rows: list[DumpedRow], agents: list[str]) -> Session:
    first = rows[0]
    outcome, acc = first.own.get("outcome"), first.line.get("acc")
    chips: list[tuple[str, str]] = []
    if failed := next((row.line["failed"] for row in rows if row.line.get("failed")), ""):
        chips.append((f"failed: {failed}", "bad"))
    elif outcome is not None:
        chips.append((f"outcome {short(outcome)}", _rated(outcome)))
        if acc is not None and acc != outcome:
            chips.append((f"right {short(acc)}", _rated(acc)))
    numbers = next((row.own["session"] for row in rows if row.own.get("session")), None) or {}
    made = [_activation(row, agents) for row in rows]
    shown = [(name, short(value)) for name, value in sorted(numbers.items()) if name != "outcome"]
    return Session(number, chips, shown, _nested(made), sum(not row.copied for row in rows))


def _activation(row: DumpedRow, agents: list[str]) -> Activation:
    own, trained, line, reward = row.own, row.trained or {}, row.line, row.reward
    advantage, chips = trained.get("advantage"), []
    if reward is not None:
        chips.append((f"reward {short(reward)}", ""))
    if isinstance(advantage, list):
        advantage = fmean(advantage)
        chips.append((f"A {advantage:+.3g} (mean; differs by token)", _tone(advantage)))
    elif advantage is not None:
        chips.append((f"A {advantage:+.3g}", _tone(advantage)))
    if not own["valid"]:
        chips.append((f"invalid {-trained.get('penalty', 0):.3g}" if trained.get("penalty") else "invalid", "bad"))
    if line.get("fault"):
        chips.append((f"fault: {line['fault']}", "bad"))
    if (own.get("counts") or {}).get("truncated"):
        chips.append(("cut at its limit", "bad"))
    copies = trained.get("copies")
    if copies is not None and copies != 1:
        chips.append(("dropped by alignment" if not copies else f"counts {short(copies)} times", "quiet"))
    if row.copied:
        chips.append(("a copy", "quiet"))
    if trained and not trained["updated"]:
        chips.append(("not trained here", "quiet"))
    pieces = [Piece(sampled, text) for sampled, text in row.pieces]
    return Activation(row, agents.index(row.agent), chips, reward, advantage, pieces, _numbers(row))


def _numbers(row: DumpedRow) -> list[tuple[str, str]]:
    own, trained = row.own, row.trained or {}
    sampled = sum(tokens for kind, tokens, _ in own["spans"] if kind)
    observed = sum(tokens for kind, tokens, _ in own["spans"] if not kind)
    numbers: dict[str, Any] = {"prompt tokens": own.get("prompt_tokens"), "sampled tokens": sampled}
    if observed:
        numbers["masked tokens"] = observed
    if trained and trained["reward"] != row.reward:
        numbers["reward with its KL term"] = trained["reward"]
    numbers |= {f"part {name}": value for name, value in (own.get("parts") or {}).items()}
    numbers |= {
        name.replace("_", " "): value for name, value in (own.get("counts") or {}).items() if name != "truncated"
    }
    if trained.get("weight") is not None:
        numbers["weight in the loss"] = trained["weight"]
    low, high = own.get("versions") or (None, None)
    if low is not None:
        numbers["weights of step"] = low if low == high else f"{low} to {high}"
    return [(name, short(value)) for name, value in numbers.items() if value is not None]


def _nested(activations: list[Activation]) -> list[Activation]:
    """The activations in the order in which they began, each inside the turn that called it."""
    by_path = {made.row.own["path"]: made for made in activations if not made.row.copied}
    top: list[Activation] = []
    for made in sorted(activations, key=lambda made: made.row.own["activation"]):
        parts = made.row.own["path"].split("/")
        parent = turn = None
        for length in range(len(parts) - 1, 0, -1):
            found = by_path.get("/".join(parts[:length]))
            if found is not None and found is not made:
                parent, turn = found, parts[length]
                break
        if parent is None:
            top.append(made)
        else:
            _turn_of(parent, turn).calls.append(made)
    return top


def _turn_of(parent: Activation, turn: str) -> Piece:
    """The piece of a response that holds a turn (`turn.3`): each was sampled in one go, with what it saw between."""
    spoken = [piece for piece in parent.pieces if piece.sampled]
    number = turn.rpartition(".")[2]
    if len(spoken) == (parent.row.own.get("turns") or 0) and number.isdecimal() and int(number) < len(spoken):
        return spoken[int(number)]
    return parent.pieces[-1]


def _table(step: DumpedStep, agents: list[str]) -> list[list[str]]:
    table = []
    for agent in agents:
        rows = [row for row in step.rows if row.agent == agent and not row.copied]
        counted = [row for row in rows if row.trained]
        pushed = [_size(row.trained["advantage"]) for row in counted if row.trained["advantage"] is not None]
        rewards = [row.reward for row in rows if row.reward is not None]
        table.append(
            [
                f"{len(rows):,}",
                f"{len({row.place[:2] for row in rows}):,}",
                f"{fmean(rewards):.3f}" if rewards else "none",
                f"{fmean(pushed):.3f}" if pushed else "none",
                f"{sum(not row.own['valid'] for row in rows):,}",
                f"{sum(n for row in rows for kind, n, _ in row.own['spans'] if kind):,}",
            ]
        )
    return table


def _size(advantage: float | list[float]) -> float:
    return fmean(map(abs, advantage)) if isinstance(advantage, list) else abs(advantage)


def _tone(advantage: float) -> str:
    return "good" if advantage > 0 else "bad" if advantage < 0 else "quiet"


def _rated(value: Any) -> str:
    """Tone of an outcome, which a workflow may give as anything."""
    return ("good" if value > 0 else "bad") if isinstance(value, int | float) else "quiet"


def short(value: Any) -> str:
    """A number in few letters; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    return f"{value:,.4g}" if abs(value) < 1000 or value != int(value) else f"{int(value):,}"
