"""One run of M-GRPO's study: `python run.py --arm co_train --stage 1 --seed 0`.

Prints the command and becomes it; `--dry-run` prints it, `--list` prints the runs of the paper's figures. The values
are in the shipped configurations; what each is and where it comes from stands in README.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from verl_drmas.config import ConfigError
from verl_drmas.quoting import quoted
from verl_drmas.study.cells import (
    SINGLE,
    TEAM_ESTIMATORS,
    Cell,
    Study,
    chosen_estimator,
    known_or_refuse,
)
from verl_drmas.study.launch import Launch, PairLaunch
from verl_drmas.support import spans_agents

BOTH = "both"


@dataclass(frozen=True)
class Arm:
    """What the paper compares.

    Attributes:
        mappings: Of agents to models and jobs that go with it; the first is meant where none is named.
        stages: Of the curriculum.
        overrides: What makes it.
    """

    mappings: tuple[str, ...] = ("separate", "shared", "pair")
    stages: tuple[str, ...] = ("1", "2", BOTH)
    overrides: tuple[str, ...] = ()


ARMS = {
    "co_train": Arm(),
    "unaligned": Arm(overrides=("drmas.alignment.mode=none",)),
    "main_only": Arm(("separate",), ("2",), ("drmas.models.sub.trainable=false",)),  # frozen in stage 2 only
    "single": Arm((SINGLE,), ("1", "2")),
}


@dataclass(frozen=True)
class ResearchCell(Cell):
    """One run, but for its seed.

    Attributes:
        arm: A key of `ARMS`.
        stage: 1 learns the format, 2 to work together, `both` is the two in one run.
    """

    arm: str = "co_train"
    stage: str = BOTH

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.arm, f"stage{self.stage}".replace(f"stage{BOTH}", "stages"))


def cell(arm: str, stage: str, mapping: str | None = None, variant: str | None = None) -> ResearchCell:
    """A run of the paper's model with its estimator."""
    mapping = mapping or ARMS[arm].mappings[0]
    return ResearchCell("30b", mapping, chosen_estimator(mapping, None, ESTIMATORS), variant, arm=arm, stage=stage)


ESTIMATORS = ("mgrpo", *TEAM_ESTIMATORS)
STUDY = Study(
    project="mgrpo_research",
    models={"30b": "qwen3_30b_a3b", "4b": "qwen3_4b", "8b": "qwen3_8b"},  # the paper has the first alone
    configs={"separate": "mgrpo", "shared": "mgrpo", "pair": "mgrpo_main", SINGLE: "mgrpo_single"},
    pairs={"pair": "mgrpo_sub"},
    estimators=ESTIMATORS,
    variants=("gspo",),
    tables={
        "figure5": [cell("co_train", "1"), cell("single", "1")],
        "figure6": [cell("co_train", "2"), cell("main_only", "2")],
        "figure7": [cell("co_train", "2"), cell("main_only", "2"), cell("single", "2")],
        "figure8": [cell("co_train", "2"), cell("unaligned", "2")],
        "decoupled": [cell("co_train", "2", "pair")],
        # Beyond the paper: both stages in one run, the ratio of a trajectory, one model in both roles.
        "curriculum": [cell("co_train", BOTH)],
        "trajectory_ratio": [cell("co_train", "2", variant="gspo")],
        "shared": [cell("co_train", "2", "shared")],
    },
)
STAGE_FILES = {"1": "~/data/mgrpo/stage1.parquet", "2": "~/data/mgrpo/stage2.parquet"}
# The paper says that stage 1 teaches the format, not when it ends. Here: when nearly all of the main agent's answers
# have it, and at the latest after the 100 steps that the authors' own figures show.
CURRICULUM = (
    f"drmas.curriculum=[{{name: format, files: [{quoted(STAGE_FILES['1'])}], until_step: 100, "
    "until_metric: drmas/workflow/main_format, above: 0.95}, "
    f"{{name: collaboration, files: [{quoted(STAGE_FILES['2'])}]}}]"
)
TOOLS = Path(__file__).resolve().parent / "research_tools.yaml"  # the single agent's, for verl's own registry
SHARED = ("drmas.agents.searcher.model=main", "~drmas.models.sub")
# The scripts' parallelism of a mixture of experts, on Megatron; the main agent's has two stages of a pipeline.
EXPERTS = (
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4",
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
)
PIPELINE = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"


def plan(
    cell: ResearchCell,
    *,
    seed: int,
    runs: Path,
    retriever: str,
    helper: str,
    helper_model: str,
    start: Path | None = None,
    further: list[str] | None = None,
) -> Launch | PairLaunch:
    """The run of a cell.

    Args:
        cell: Which.
        seed: Its seed.
        runs: Folder of all runs.
        retriever: Address of the search server; several with commas between.
        helper: Address of the server that reasons for the main agent and judges the sub-agent's work; likewise.
        helper_model: The model's name there.
        start: Of stage 2: the folder with the models that stage 1 left.
        further: The user's own overrides.

    Raises:
        ConfigError: There is no such run; names option, value and fix.
    """
    known_or_refuse("--arm", cell.arm, ARMS)
    arm = ARMS[cell.arm]
    known_or_refuse(f"--mapping (with --arm {cell.arm})", cell.mapping, arm.mappings)
    known_or_refuse(f"--stage (with --arm {cell.arm})", cell.stage, arm.stages)
    if cell.arm == "unaligned" and cell.estimator != "mgrpo":
        raise ConfigError(
            f"--estimator (with --arm unaligned) is {cell.estimator!r}; known: mgrpo, the one that has an alignment to "
            "leave out"
        )
    if cell.mapping == "pair" and spans_agents(cell.estimator):
        known = ", ".join(name for name in ESTIMATORS if not spans_agents(name))
        raise ConfigError(
            f"--estimator (with --mapping pair) is {cell.estimator!r}; known: {known}: a job holds its own agents "
            "alone, so that groups must be of one agent"
        )
    if cell.stage == "2" and start is None:
        raise ConfigError(
            "--start is missing: stage 2 goes on from stage 1; give the folder that `verl-drmas export` wrote of its "
            "checkpoint (to leave stage 1 out: one with the base model as `main` and `sub`)"
        )
    if cell.stage != "2" and start is not None:
        raise ConfigError(f"--start is for --stage 2, and the stage is {cell.stage}; leave one of them out")
    overrides = [*arm.overrides, *(SHARED if cell.mapping == "shared" else ())]
    of_each: dict[str, list[str]] = {"main": [], "sub": []}
    own = _data(cell) + _parallel(cell) + (_from_stage_1(cell.mapping, start.resolve()) if start else [])
    for job, override in own:
        (of_each[job] if job else overrides).append(override)
    searched, helped = f"[{retriever}]", f"[{helper}]"
    variables = {}
    if cell.mapping == SINGLE:
        overrides.append(f"actor_rollout_ref.rollout.multi_turn.tool_config_path={quoted(str(TOOLS))}")
        variables = {"DRMAS_RETRIEVER_URLS": searched, "DRMAS_HELPER_URLS": helped, "DRMAS_HELPER_MODEL": helper_model}
    else:
        overrides.append(f"drmas.workflow.tools.search.retrieval.urls={searched}")
        for part in ("tools.reason", "judge"):
            overrides.append(f"drmas.workflow.{part}.urls={helped}")
            overrides.append(f"drmas.workflow.{part}.model={quoted(helper_model)}")
    return STUDY.launch(
        cell,
        seed=seed,
        runs=runs,
        overrides=overrides,
        of_each=of_each,
        environment=variables,
        further=further or (),
    )


def _data(cell: ResearchCell) -> list[tuple[str, str]]:
    """What is trained on: overrides, each with the job of a pair that it is for alone."""
    job = "main" if cell.mapping == "pair" else ""  # the other has no prompts
    if cell.stage == BOTH:
        return [(job, CURRICULUM), (job, "data.dataloader_num_workers=0")]
    return [(job, f"data.train_files={quoted(STAGE_FILES[cell.stage])}")]


def _parallel(cell: ResearchCell) -> list[tuple[str, str]]:
    """How a mixture of experts is laid over GPUs; as `_data`."""
    if (cell.engine, cell.size) != ("megatron", "30b"):
        return []
    both = [("", key) for key in EXPERTS]
    if cell.mapping == "separate":
        return [*both, ("", f"++drmas.models.main.{PIPELINE}")]
    return [*both, ("main" if cell.mapping == "pair" else "", PIPELINE)]


def _from_stage_1(mapping: str, start: Path) -> list[tuple[str, str]]:
    """The models that `verl-drmas export` wrote, each in a folder of its name; a single agent's is `main`."""
    one = f"actor_rollout_ref.model.path={quoted(str(start / 'main'))}"
    if mapping in (SINGLE, "shared"):
        return [("", one)]
    each = {
        name: f"++drmas.models.{name}.actor_rollout_ref.model.path={quoted(str(start / name))}"
        for name in ("main", "sub")
    }
    if mapping == "pair":
        return [("main", each["main"]), ("main", each["sub"]), ("sub", each["sub"])]
    return [("", override) for override in each.values()]


def check_start(start: Path, mapping: str) -> None:
    """Look whether a run that starts from stage 1 finds its models.

    Raises:
        ConfigError: One isn't there; names option, folder and fix.
    """
    for name in ("main",) if mapping in (SINGLE, "shared") else ("main", "sub"):
        if not (start / name / "config.json").is_file():
            raise ConfigError(
                f"--start is {str(start)!r}, and {name}/config.json isn't there; give the folder that `verl-drmas "
                f"export` wrote (its --out), with a model in {name}"
            )


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    arm: Annotated[str, typer.Option(help="co_train (M-GRPO), single, main_only or unaligned.")] = "co_train",
    stage: Annotated[str, typer.Option(help="1, 2, or both in one run.")] = BOTH,
    start: Annotated[
        Path | None, typer.Option(help="For stage 2: folder of models that stage 1 left (main, sub).")
    ] = None,
    mapping: Annotated[
        str | None, typer.Option(help="separate, pair (two jobs) or shared; single for the single agent.")
    ] = None,
    size: Annotated[str, typer.Option(help="30b (Qwen3-30B-A3B), 4b or 8b (Qwen3).")] = "30b",
    estimator: Annotated[str | None, typer.Option(help=f"{', '.join(ESTIMATORS)}; grpo for the single agent.")] = None,
    seed: Annotated[int, typer.Option(help="Of the data's order and the engines' sampling.")] = 0,
    engine: Annotated[str, typer.Option(help="fsdp2 or megatron.")] = "fsdp2",
    variant: Annotated[str | None, typer.Option(help="gspo.")] = None,
    retriever: Annotated[str, typer.Option(help="Address of the search server; several with commas between.")] = (
        "http://127.0.0.1:8000"
    ),
    helper: Annotated[str, typer.Option(help="Address of the reasoner's and judge's server; several likewise.")] = (
        "http://127.0.0.1:8001/v1"
    ),
    helper_model: Annotated[str, typer.Option(help="The model's name there.")] = "Qwen/Qwen3-30B-A3B",
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, start nothing.")] = False,
    list_: Annotated[
        str | None, typer.Option("--list", metavar="TABLE", help="Print the runs of a figure, or of `all`.")
    ] = None,
) -> None:
    """Train one cell of the study."""
    try:
        if list_ is not None:
            typer.echo(STUDY.listed(None if list_ == "all" else list_))
            return
        known_or_refuse("--arm", arm, ARMS)
        mapping = mapping or ARMS[arm].mappings[0]
        chosen = ResearchCell(
            size,
            mapping,
            chosen_estimator(mapping, estimator, ESTIMATORS),
            variant,
            engine,
            arm=arm,
            stage=stage,
        )
        run = plan(
            chosen,
            seed=seed,
            runs=runs,
            retriever=retriever,
            helper=helper,
            helper_model=helper_model,
            start=start,
            further=overrides or [],
        )
        if start is not None and not dry_run:
            check_start(start, mapping)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(run.shown())
    if not dry_run:
        run.start()


if __name__ == "__main__":
    typer.run(main)
