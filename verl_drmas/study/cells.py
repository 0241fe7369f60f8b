"""The runs of a study: model size, mapping of agents to models, estimator, variant and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from verl_drmas.config import ConfigError, nearest
from verl_drmas.study.launch import Launch, PairLaunch, launch, launch_pair

SINGLE = "single"  # the mapping of one agent, on verl's own trainer
SINGLE_ESTIMATOR = "grpo"
TEAM_ESTIMATORS = ("drmas", "grpo_team", "drmas_mean", "drmas_std", "grpo_activation")
ENGINES = {"fsdp2": "dp", "megatron": "megatron"}  # verl's `model_engine`
VARIANTS = ("dapo", "gspo")  # of configs/drmas_variant; each goes with every configuration


@dataclass(frozen=True)
class Cell:
    """One run, but for its seed.

    Attributes:
        size: Of the model, a key of `Study.models`.
        mapping: Of agents to models, a key of the study's configurations.
        estimator: One of verl's or ours.
        variant: A loss (`VARIANTS`), another team of `Study.teams`, or None.
        engine: What trains.
    """

    size: str
    mapping: str
    estimator: str
    variant: str | None = None
    engine: str = "fsdp2"

    @property
    def labels(self) -> tuple[str, ...]:
        """What further options of a recipe's own give to the run's name."""
        return ()

    def options(self) -> list[str]:
        """The cell as arguments of a recipe's script, defaults left out."""
        named = [(f"--{f.name}", getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return [part for pair in named for part in pair]


# The columns of the paper's tables 1 and 2, in their order.
COLUMNS = {
    "single_grpo": (SINGLE, SINGLE_ESTIMATOR),
    "shared_grpo": ("shared", "grpo_team"),
    "shared_drmas": ("shared", "drmas"),
    "separate_grpo": ("separate", "grpo_team"),
    "separate_drmas": ("separate", "drmas"),
}


def columns(*sizes: str) -> tuple[Cell, ...]:
    """All columns of a table, for each size."""
    return tuple(Cell(size, mapping, estimator) for size in sizes for mapping, estimator in COLUMNS.values())


@dataclass(frozen=True)
class Study:
    """What a recipe offers.

    Attributes:
        project: Name of the study, and of its runs' folder.
        models: Option of configs/drmas_model by size.
        configs: Shipped configuration by mapping.
        sizes: Of mappings that not every size has.
        teams: Configurations by mapping, of variants that are another team.
        pairs: Configurations of the second job, by mapping, where a run is two jobs.
        estimators: Of its teams; the first is the one that is meant where none is named.
        variants: Those of `VARIANTS` that go with it.
        tables: The paper's tables, figures and further comparisons, by name: which cells they are made of.
    """

    project: str
    models: Mapping[str, str]
    configs: Mapping[str, str]
    tables: Mapping[str, Sequence[Cell]]
    sizes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    teams: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    pairs: Mapping[str, str] = field(default_factory=dict)
    estimators: Sequence[str] = TEAM_ESTIMATORS
    variants: Sequence[str] = VARIANTS

    def cells(self) -> dict[Cell, list[str]]:
        """Every cell of the tables once, with the tables it is in."""
        found: dict[Cell, list[str]] = {}
        for table, cells in self.tables.items():
            for cell in cells:
                found.setdefault(cell, []).append(table)
        return found

    def config(self, cell: Cell) -> str:
        """Name of the cell's shipped configuration.

        Raises:
            ConfigError: There is no such run; names option, value and fix.
        """
        known_or_refuse("--size", cell.size, self.models)
        known_or_refuse("--variant", cell.variant, [None, *self.variants, *self.teams])
        known_or_refuse("--engine", cell.engine, ENGINES)
        configs = self.teams.get(cell.variant, self.configs)
        known_or_refuse("--mapping", cell.mapping, configs)
        known_or_refuse(f"--size (with --mapping {cell.mapping})", cell.size, self.sizes.get(cell.mapping, self.models))
        estimators = (SINGLE_ESTIMATOR,) if cell.mapping == SINGLE else self.estimators
        known_or_refuse(f"--estimator (with --mapping {cell.mapping})", cell.estimator, estimators)
        return configs[cell.mapping]

    def experiment(self, cell: Cell) -> str:
        """The run's name, without its seed."""
        engine = None if cell.engine == "fsdp2" else cell.engine
        parts = (self.models[cell.size], *cell.labels, cell.mapping, cell.estimator, cell.variant, engine)
        return "_".join(part for part in parts if part)

    def launch(
        self,
        cell: Cell,
        *,
        seed: int,
        runs: Path,
        overrides: Sequence[str] = (),
        of_each: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        further: Sequence[str] = (),
    ) -> Launch | PairLaunch:
        """The run of a cell.

        Args:
            cell: Which.
            seed: Its seed.
            runs: Folder of all runs.
            overrides: What the recipe sets beside the cell.
            of_each: What it sets in one job of a pair alone, by `main` and `sub`.
            environment: Variables that the workers of a run in one job need.
            further: The user's own overrides.

        Raises:
            ConfigError: As `config`.
        """
        config = self.config(cell)
        chosen = [f"drmas_model={self.models[cell.size]}"]
        chosen += [f"+drmas_variant={cell.variant}"] if cell.variant in VARIANTS else []
        chosen += [f"model_engine={ENGINES[cell.engine]}"] if cell.engine != "fsdp2" else []
        chosen += [f"algorithm.adv_estimator={cell.estimator}"] if cell.mapping != SINGLE else []
        if cell.mapping in self.pairs:
            return launch_pair(
                (self.config(cell), self.pairs[cell.mapping]),
                [*chosen, *overrides],
                project=self.project,
                experiment=self.experiment(cell),
                runs=runs,
                seed=seed,
                of_each=of_each,
                further=further,
            )
        return launch(
            config,
            [*chosen, *overrides],
            project=self.project,
            experiment=self.experiment(cell),
            runs=runs,
            seed=seed,
            environment=environment,
            further=further,
        )

    def listed(self, table: str | None = None) -> str:
        """The cells of a table, or of all, one a line: arguments of the recipe's script, and the tables they are in.

        Raises:
            ConfigError: No such table.
        """
        if table is not None:
            known_or_refuse("--list", table, self.tables)
        chosen = {cell: names for cell, names in self.cells().items() if table is None or table in names}
        return "\n".join(f"{' '.join(cell.options()):<75} # {', '.join(names)}" for cell, names in chosen.items())


def megatron(cell: Cell) -> Cell:
    """The same run on Megatron workers."""
    return replace(cell, engine="megatron")


def chosen_estimator(mapping: str, estimator: str | None, known: Sequence[str] = TEAM_ESTIMATORS) -> str:
    """The estimator that is meant where none is named: the paper's method, or GRPO for a single agent."""
    return estimator or (SINGLE_ESTIMATOR if mapping == SINGLE else known[0])


def known_or_refuse(option: str, value: str | None, known: Sequence[str | None] | Mapping[str, object]) -> None:
    """Refuse a value that an option doesn't have.

    Raises:
        ConfigError: Names option, value, and the nearest that it has.
    """
    if value not in known:
        names = [name for name in known if name is not None]
        raise ConfigError(f"{option} is {value!r}; {nearest(str(value), names)}")
