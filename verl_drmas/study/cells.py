"""The runs of a study: model size, mapping of agents to models, estimator, variant and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from verl_drmas.config import ConfigError, nearest
from verl_drmas.study.launch import Launch, launch

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
        tables: The paper's tables, figures and further comparisons, by name: which cells they are made of.
    """

    project: str
    models: Mapping[str, str]
    configs: Mapping[str, str]
    tables: Mapping[str, Sequence[Cell]]
    sizes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    teams: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

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
        _known("--size", cell.size, self.models)
        _known("--variant", cell.variant, [None, *VARIANTS, *self.teams])
        _known("--engine", cell.engine, ENGINES)
        configs = self.teams.get(cell.variant, self.configs)
        _known("--mapping", cell.mapping, configs)
        _known(f"--size (with --mapping {cell.mapping})", cell.size, self.sizes.get(cell.mapping, self.models))
        estimators = (SINGLE_ESTIMATOR,) if cell.mapping == SINGLE else TEAM_ESTIMATORS
        _known(f"--estimator (with --mapping {cell.mapping})", cell.estimator, estimators)
        return configs[cell.mapping]

    def experiment(self, cell: Cell) -> str:
        """The run's name, without its seed."""
        engine = None if cell.engine == "fsdp2" else cell.engine
        parts = (self.models[cell.size], cell.mapping, cell.estimator, cell.variant, engine)
        return "_".join(part for part in parts if part)

    def launch(
        self,
        cell: Cell,
        *,
        seed: int,
        runs: Path,
        overrides: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        further: Sequence[str] = (),
    ) -> Launch:
        """The run of a cell.

        Args:
            cell: Which.
            seed: Its seed.
            runs: Folder of all runs.
            overrides: What the recipe sets beside the cell.
            environment: Variables that the run's workers need.
            further: The user's own overrides.

        Raises:
            ConfigError: As `config`.
        """
        config = self.config(cell)
        chosen = [f"drmas_model={self.models[cell.size]}"]
        chosen += [f"+drmas_variant={cell.variant}"] if cell.variant in VARIANTS else []
        chosen += [f"model_engine={ENGINES[cell.engine]}"] if cell.engine != "fsdp2" else []
        chosen += [f"algorithm.adv_estimator={cell.estimator}"] if cell.mapping != SINGLE else []
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
            _known("--list", table, self.tables)
        chosen = {cell: names for cell, names in self.cells().items() if table is None or table in names}
        return "\n".join(f"{' '.join(cell.options()):<75} # {', '.join(names)}" for cell, names in chosen.items())


def megatron(cell: Cell) -> Cell:
    """The same run on Megatron workers."""
    return replace(cell, engine="megatron")


def chosen_estimator(mapping: str, estimator: str | None) -> str:
    """The estimator that is meant where none is named: the paper's method, or GRPO for a single agent."""
    return estimator or (SINGLE_ESTIMATOR if mapping == SINGLE else TEAM_ESTIMATORS[0])


def _known(option: str, value: str | None, known: Sequence[str | None] | Mapping[str, object]) -> None:
    if value not in known:
        names = [name for name in known if name is not None]
        raise ConfigError(f"{option} is {value!r}; {nearest(str(value), names)}")
