"""Writes what the study found as Markdown: tables and pictures, and what was checked. It draws no conclusions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recipes.study_stability import penalties
from recipes.study_stability.moments import extreme
from recipes.study_stability.summary import Run, choose, estimate, main_runs, paired
from recipes.study_stability.training import ESTIMATORS, PENALISED, Setting
from recipes.study_stability.worlds import AGENTS
from verl_drmas.report.stats import Estimate

BASE = "grpo_team"
UNEVEN = ("search", "rescue")

Rows = Sequence[dict[str, Any]]


def markdown(runs: Sequence[Run], probe: Rows, moments: Rows, penalty: Rows, pictures: Mapping[str, str]) -> str:
    """Returns the whole page; `pictures` are file names with their captions."""
    one = runs[0].setting
    parts = [
        "# Results",
        f"{len(runs)} runs: {len({run.setting.seed for run in runs})} seeds, {one.budget:,} sampled actions each, "
        f"{one.prompts} prompts of {one.sessions} sessions a step, {one.updates} updates a step. Unless a table says "
        f"otherwise: {Setting.optimiser}, learning rate {Setting.rate:g}. ± is the standard error over seeds; "
        f"differences are to `{BASE}` with the same seed, with the number of seeds in which they are above 0.",
        *_section("What must hold, and held", _checks(runs, moments)),
        *_section("Learning", _learning(runs), pictures, "learning.png"),
        *_section("Gradient norms", _norms(runs), pictures, "norms.png"),
        *_section("Learning rates", _rates(runs), pictures, "rates.png"),
        *_section("Inflation factors", _factors(runs, moments), pictures, "factors.png", "moments.png"),
        *_section("At policies held still", _probe(probe), pictures, "probe.png"),
        *_section("Groups with nothing but a penalty", _penalties(runs, penalty), pictures, "penalty.png"),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, text: Iterator[str], pictures: Mapping[str, str] | None = None, *names: str) -> Iterator[str]:
    yield f"## {title}"
    yield from text
    for name in names:
        yield f"![{name.removesuffix('.png')}]({name})\n\n*{pictures[name]}*"


def _checks(runs: Sequence[Run], moments: Rows) -> Iterator[str]:
    bounded = [run for run in runs if run.setting.penalty is None or run.setting.penalty.place == "outside"]
    largest = max(run.as_dict()["agents"][agent]["f_max"] for run in bounded for agent in AGENTS)
    bound = bounded[0].setting.sessions - 1
    even = [m["f"] for m in moments if m["world"] == "even"]
    gap = _twins(runs)
    rows = [
        ["F <= N - 1 in every group of every step without a penalty inside", f"{largest:.12g} <= {bound}"],
        ["F = 1 in the world `even`, largest distance", f"{max(abs(f - 1) for f in even):.1e}"],
        [
            f"Lemma 4.2, largest relative error over {len(moments):,} groups",
            f"{max(m['error'] for m in moments):.1e}",
        ],
        ["`even`: largest difference of any step's success, `drmas` less `grpo_team`", f"{gap[0]:.1e}"],
        ["`even`: largest relative difference of any gradient norm between the two", f"{gap[1]:.1e}"],
    ]
    yield _table(["what", "measured"], rows)
    yield "The group that reaches the bound: one session of N succeeds, and only there the agent acts."
    sizes = (2, 5, 8, 16)
    found = {size: extreme(size) for size in sizes}
    yield _table(
        ["N", "F", "size of `grpo_team`'s advantage", "size of `drmas`'s"],
        [[str(n), *(f"{found[n][key]:.3f}" for key in ("f", "grpo_team", "drmas"))] for n in sizes],
    )


def _twins(runs: Sequence[Run]) -> tuple[float, float]:
    """How far `drmas` and `grpo_team` are apart in the even world: success, and gradient norms relatively."""
    success, norm = 0.0, 0.0
    for one, other in zip(*(choose(runs, world="even", estimator=name) for name in ("drmas", BASE)), strict=True):
        for mine, theirs in zip(one.steps, other.steps, strict=True):
            success = max(success, abs(mine["success"] - theirs["success"]))
            for agent in AGENTS:
                a, b = mine["agents"][agent]["norm"], theirs["agents"][agent]["norm"]
                norm = max(norm, abs(a - b) / max(a, b, 1e-12))
    return success, norm


def _learning(runs: Sequence[Run]) -> Iterator[str]:
    rows = []
    for world in (*UNEVEN, "even"):
        for name in ESTIMATORS:
            chosen, base = main_runs(runs, world, name), main_runs(runs, world, BASE)
            rows.append(
                [
                    world,
                    f"`{name}`",
                    _shown(estimate(chosen, lambda run: run.area)),
                    _difference(*paired(chosen, base, lambda run: run.area), len(base)) if name != BASE else "",
                    _shown(estimate(chosen, lambda run: run.final)),
                    _difference(*paired(chosen, base, lambda run: run.final), len(base)) if name != BASE else "",
                ]
            )
    yield _table(["world", "estimator", "mean success", "difference", "success at the end", "difference"], rows)


def _norms(runs: Sequence[Run]) -> Iterator[str]:
    yield (
        "Mean over seeds of a run's median, and in brackets its ratio to that of `grpo_team`; the largest norm of any "
        "seed; the largest norm over its running median; and the spikes of all seeds (over 5 times that median)."
    )
    rows = []
    for world in UNEVEN:
        for agent in AGENTS:
            base = np.mean([run["norm_median"] for run in _agents(main_runs(runs, world, BASE), agent)])
            for name in ESTIMATORS:
                found = _agents(main_runs(runs, world, name), agent)
                median = np.mean([run["norm_median"] for run in found])
                rows.append(
                    [
                        world,
                        agent,
                        f"`{name}`",
                        f"{median:.3f} ({median / base:.2f})",
                        f"{max(run['norm_max'] for run in found):.3f}",
                        _worst(found),
                        str(sum(run["spikes"] for run in found)),
                    ]
                )
    yield _table(["world", "agent", "estimator", "median", "largest", "over median", "spikes"], rows)


def _rates(runs: Sequence[Run]) -> Iterator[str]:
    yield "Mean success over the budget, and the spikes of all agents and seeds."
    arms = sorted({(r.setting.optimiser, r.setting.rate) for r in runs if r.setting.world in UNEVEN})
    for world in UNEVEN:
        rows = []
        for optimiser, rate in arms:
            cells = []
            for name in ESTIMATORS:
                chosen = choose(runs, world=world, estimator=name, optimiser=optimiser, rate=rate)
                spikes = sum(run.spikes(agent) for run in chosen for agent in AGENTS)
                cells.append(f"{_shown(estimate(chosen, lambda run: run.area))}; {spikes}")
            mine, base = (
                choose(runs, world=world, estimator=name, optimiser=optimiser, rate=rate) for name in ("drmas", BASE)
            )
            gap = _difference(*paired(mine, base, lambda run: run.area), len(base))
            rows.append([f"{optimiser} {rate:g}", *cells, gap])
        yield f"World `{world}`:"
        yield _table(["", *(f"`{name}`" for name in ESTIMATORS), f"`drmas` less `{BASE}`"], rows)


def _factors(runs: Sequence[Run], moments: Rows) -> Iterator[str]:
    yield (
        "Mean over steps, prompts and seeds, the largest mean of any step (seeds averaged), the largest group, and the "
        "share of the agent's groups that are constant or of one row."
    )
    rows = []
    for world in UNEVEN:
        for agent in AGENTS:
            for name in (BASE, "drmas"):
                chosen = main_runs(runs, world, name)
                grid = np.linspace(0, chosen[0].setting.budget, 81)
                curves = np.array([np.interp(grid, *run.series(agent, "f")) for run in chosen])
                flat = np.mean([np.mean(run.series(agent, "zero_std")[1]) for run in chosen])
                largest = max(run["f_max"] for run in _agents(chosen, agent))
                rows.append(
                    [
                        world,
                        agent,
                        f"`{name}`",
                        f"{curves.mean():.2f}",
                        f"{curves.mean(0).max():.2f}",
                        f"{largest:.2f}",
                        f"{flat:.0%}",
                    ]
                )
    yield _table(["world", "agent", "estimator", "F", "largest step", "largest group", "constant"], rows)
    yield (
        "What the lemma's terms come to, averaged over the groups of policies held still: the gradient's second moment "
        "under the prompt's statistics, its parts E|z|² F and Delta, and the second moment under the agent's own "
        "statistics; and the correlation of F with the first over E|z|²."
    )
    rows = []
    for world in UNEVEN:
        for agent in AGENTS:
            here = [m for m in moments if (m["world"], m["agent"]) == (world, agent)]
            parts = [(m["shared"], m["z2"] * m["f"], m["delta"], m["own"]) for m in here]
            terms = [np.mean(v) for v in zip(*parts, strict=True)]
            along = np.corrcoef([m["f"] for m in here], [m["shared"] / m["z2"] for m in here])[0, 1]
            rows.append([world, agent, f"{len(here):,}", *(f"{term:.3f}" for term in terms), f"{along:.2f}"])
    yield _table(["world", "agent", "groups", "shared", "E\\|z\\|² F", "Delta", "own", "correlation"], rows)


def _probe(probe: Rows) -> Iterator[str]:
    times = sorted({row["at"] for row in probe})
    yield (
        "After "
        + ", ".join(f"{at:.0%}" for at in times)
        + " of the budget of a `grpo_team` run. *Alignment* is the mean cosine of one batch's gradient with the true "
        "gradient, *bias* the cosine of the mean gradient with its standard error over seeds (noise: no seed's batches "
        "tell it; where fewer than all do, of how many), *silent* the share of rows in prompts with both outcomes "
        "that are not pushed at all. `even` is the control: there all estimators point the same way."
    )
    rows = []
    for world in (*UNEVEN, "even"):
        for agent in AGENTS:
            for name in ESTIMATORS:
                here = [r for r in probe if (r["world"], r["agent"], r["estimator"]) == (world, agent, name)]

                def over(key: str, here: Rows = here) -> str:
                    return " / ".join(f"{np.mean([r[key] for r in here if r['at'] == at]):.2f}" for at in times)

                bias = " / ".join(_bias([r["cosine"] for r in here if r["at"] == at]) for at in times)
                rows.append([world, agent, f"`{name}`", over("alignment"), bias, over("silent")])
    yield _table(["world", "agent", "estimator", "alignment", "bias", "silent"], rows)


def _penalties(runs: Sequence[Run], penalty: Rows) -> Iterator[str]:
    worst = max(abs(row["measured"] - row["predicted"]) for row in penalty)
    yield (
        f"Advantage of the one malformed row, from `penalised_advantage`; the formulas agree to {worst:.1e} in all "
        f"{len(penalty)} combinations."
    )
    ways = list(penalties.WAYS)
    chosen = {(r["way"], r["size"], r["coefficient"]): r["measured"] for r in penalty}
    rows = [
        [
            str(size),
            f"{(size - 1) / np.sqrt(size):.3f}",
            *(f"{chosen[way, size, c]:.3f}" for way in ways for c in (0.01, 0.1)),
        ]
        for size in penalties.SIZES
    ]
    yield _table(["n", "(n - 1) / √n", *(f"{way}: {c:g}" for way in ways for c in (0.01, 0.1))], rows)
    reach = penalties.reach()
    yield (
        "One fault that costs 0.01 in a prompt of 8 sessions that all failed, each with 3 calls of two agents: "
        + "; ".join(
            f"`{name}` pushes {found['pushed']:.0f} rows down, {found['other']:.0f} of them the other agent's, the "
            f"faulty one by {found['faulty']:.2f}"
            for name, found in reach.items()
        )
        + "."
    )
    yield "In training (`search` with malformed actions, 10 % of them before training):"
    rows = []
    settings = list(dict.fromkeys(run.setting.penalty for run in runs if run.setting.world == "faulty"))
    for name in PENALISED:
        for setting in settings:
            here = choose(runs, world="faulty", estimator=name, penalty=setting)
            free = choose(runs, world="faulty", estimator=name, penalty=None)
            base = choose(runs, world="faulty", estimator=BASE, penalty=setting)
            rows.append(
                [
                    f"`{name}`",
                    setting.name if setting else "none",
                    _shown(estimate(here, lambda run: run.final)),
                    _difference(*paired(here, free, lambda run: run.final), len(free)) if setting else "",
                    _difference(*paired(here, base, lambda run: run.final), len(base)) if name != BASE else "",
                    f"{np.mean([run.valid() for run in here]):.1%}",
                    f"{np.mean([run.flat_mass for run in here]):.1%}",
                ]
            )
    yield _table(
        [
            "estimator",
            "penalty",
            "success at the end",
            "less that without a penalty",
            f"less `{BASE}`",
            "well formed at the end",
            "push by penalties alone",
        ],
        rows,
    )


def _bias(cosines: Sequence[float | None]) -> str:
    """Mean over the seeds whose batches tell it."""
    told = [cosine for cosine in cosines if cosine is not None]
    of = f" ({len(told)} of {len(cosines)})" if told and len(told) < len(cosines) else ""
    return _shown(Estimate.of(told)) + of if told else "noise"


def _agents(runs: Sequence[Run], agent: str) -> list[dict[str, Any]]:
    return [run.as_dict()["agents"][agent] for run in runs]


def _worst(runs: Sequence[dict[str, Any]]) -> str:
    """The largest norm over its running median; a run too short for one has none."""
    return f"{max(worst):.1f}" if (worst := [r["norm_over_median"] for r in runs if r["norm_over_median"]]) else "-"


def _shown(value: Estimate | None) -> str:
    return "not run" if value is None else f"{value.mean:.3f}{_error(value)}"


def _difference(value: Estimate | None, above: int, of: int) -> str:
    return "not run" if value is None else f"{value.mean:+.3f}{_error(value)} ({above} of {of})"


def _error(value: Estimate) -> str:
    """The standard error over seeds; one seed has none."""
    return "" if value.error is None else f" ± {value.error:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
