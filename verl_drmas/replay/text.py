"""A replay as Markdown, for a bug report."""

from __future__ import annotations

from collections.abc import Sequence

from verl_drmas import __version__
from verl_drmas.replay.compare import Comparison, as_trained
from verl_drmas.replay.run import Trained
from verl_drmas.report.blocks import clean

HEAD = (
    *("estimator", "agent", "rows", "mean A", "std A", "mean abs A", "max abs A", "mass", "F mean", "F max"),
    *("no spread", "sign flips", "one-sided", "largest difference"),
)
LEGEND = """\
- *mean A, std A, mean abs A, max abs A*: of the rows' advantages; *mass*: the agent's share of sum |A| x tokens.
- *F*: the inflation factor of Lemma 4.2 of Dr. MAS over the agent's prompts; *no spread*: share of its groups whose
  rewards are all equal, or that have one row.
- *sign flips*: share of rows that are pushed the other way than in training; *one-sided*: that only one of both pushes.
- *largest difference*: of a token's advantage from the one that was trained."""


def to_markdown(trained: Trained, comparisons: Sequence[Comparison]) -> str:
    """The text.

    Args:
        trained: The step.
        comparisons: Of every estimator.
    """
    step, settings = trained.step, trained.step.settings
    own = settings["base_estimator"] or settings["estimator"]
    sessions = len({row.place[:2] for row in trained.rows})
    prompts = len({row.place[0] for row in trained.rows})
    options = ", ".join(f"{key}={value}" for key, value in settings["section"]["advantage"].items() if key != "shadow")
    lines = [
        f"# Replay of step {step.step}",
        "",
        f"- dump: `{clean(str(step.file))}`, {len(trained.rows)} rows of {sessions} sessions and {prompts} prompts",
        f"- trained with: `{clean(own)}`{' by agent' if settings['base_estimator'] else ''}; {options}",
    ]
    if alignment := settings["alignment"]:
        lines.append(f"- alignment: {settings['copies']}, {alignment['mode']}, target {alignment['target']}")
    lines.append(f"- verl-drmas {clean(str(settings['version']))} dumped it, {__version__} replays it")
    lines += ["", *_verdicts(comparisons), ""]
    lines += [_line(HEAD), _line(["---"] * 2 + ["---:"] * (len(HEAD) - 2))]
    for agent, numbers in as_trained(trained).items():
        lines.append(_line(["as trained", _code(agent), *_numbers(numbers), *["-"] * (len(HEAD) - 7)]))
    for one in comparisons:
        for agent, numbers in one.agents.items():
            more = [_short(numbers.get(key)) for key in ("mass", "f_mean", "f_max", "no_spread", "flips", "one_sided")]
            name = one.replayed.arm.name
            lines.append(_line([name, _code(agent), *_numbers(numbers), *more, f"{numbers['difference']:.3g}"]))
    return "\n".join([*lines, "", LEGEND, ""])


def _verdicts(comparisons: Sequence[Comparison]) -> list[str]:
    lines = []
    for one in comparisons:
        name = one.replayed.arm.name
        if one.replayed.arm.own and one.same:
            said = f"the step's own: the same as trained (largest difference {one.difference:.3g})"
        elif one.replayed.arm.own:
            copies = f", and {one.copies_differ} rows count otherwise" if one.copies_differ else ""
            said = f"the step's own, and NOT as trained: differs by up to {one.difference:.3g}{copies}"
        else:
            said = f"differs from the training by up to {one.difference:.3g}"
        lines.append(f"- **{name}**: {said}")
    return lines


def _numbers(numbers: dict[str, float]) -> list[str]:
    return [f"{numbers['rows']:,}", *(_short(numbers[key]) for key in ("mean", "std", "abs_mean", "abs_max"))]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _code(name: str) -> str:
    return "`" + clean(name).replace("`", "'").replace("|", "/") + "`"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
