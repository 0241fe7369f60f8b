"""`verl-drmas plan <the same arguments as main_ppo> [--gpu-memory GIB]`: what a run needs of each GPU, printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from verl_drmas.check import Prepared, prepare_keys
from verl_drmas.check_command import compose_as_verl
from verl_drmas.config import OWN_POOL, ConfigError
from verl_drmas.plan import formulas
from verl_drmas.plan.fixes import Fix, own_pools, suggest
from verl_drmas.plan.formulas import GIB, Shape, Trainer
from verl_drmas.plan.inputs import ModelStep, read_pools, read_step
from verl_drmas.plan.pool import PoolNeeds, PoolPlan, plan_pool

DEFAULT_GIB = 80.0
TIGHT = 0.9  # of the memory: what estimates and a fragmented allocator may eat up


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """Compose, estimate and print. Returns the exit status: 0 if all pools fit, 1 if not or if refused."""
    console = console or Console(width=None if sys.stdout.isatty() else 110)
    try:
        gib, rest = _memory(arguments)
        config = compose_as_verl(rest)
        prepared = prepare_keys(config)
        pools = read_pools(prepared)
        steps = read_step(config, prepared)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        console.print(f"refused: {' '.join(str(error).split())}", style="bold red", markup=False, soft_wrap=True)
        return 1
    memory = int(gib * GIB)
    plans = [plan_pool(needs, memory) for needs in pools]
    for plan in plans:
        for table in (train_table(plan), server_table(plan), phase_table(plan)):
            if table.row_count:
                console.print(table)
    console.print(step_table(steps))
    console.print("all sizes are estimates, in GiB a GPU; padding inside a micro-batch isn't counted", style="dim")
    for plan in plans:
        for line in advice(plan, prepared):
            console.print(line, markup=False, soft_wrap=True, style=None if plan.fits else "bold")
    fits = all(plan.fits for plan in plans)
    console.print(f"fits in {gib:g} GiB" if fits else f"does not fit in {gib:g} GiB", style="green" if fits else "red")
    return 0 if fits else 1


def _memory(arguments: Sequence[str]) -> tuple[float, list[str]]:
    """The option and the arguments that are main_ppo's."""
    parser = argparse.ArgumentParser(prog="verl-drmas plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu-memory", default=str(DEFAULT_GIB))
    flags, rest = parser.parse_known_args(list(arguments))
    try:
        gib = float(flags.gpu_memory)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise ConfigError(f"--gpu-memory is {flags.gpu_memory!r}; give the GiB of one GPU, such as 80")
    return gib, rest


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if abs(size) >= GIB / 100 or not size else f"{size / GIB:.4f}"


def _title(needs: PoolNeeds) -> str:
    return f"pool {needs.name}, {needs.nnodes} x {needs.n_gpus_per_node} GPUs"


def train_table(plan: PoolPlan) -> Table:
    """What each trained model holds on a GPU while it works."""
    table = Table(title=f"{_title(plan.needs)}: training, with the tokens of a micro-batch", title_justify="left")
    columns = ("model", "parameters", "weights", "gradients", "optimiser", "activations", "log-probs", "reference")
    for column in (*columns, "off-loaded when idle"):
        table.add_column(column)
    for model in plan.needs.models:
        shape, trainer = model.shape, model.trainer
        if trainer is None:
            table.add_row(model.model_id, f"{shape.parameters / 1e9:.3g} B", *["-"] * 7)
            continue
        table.add_row(
            model.model_id,
            f"{shape.parameters / 1e9:.3g} B",
            _gib(formulas.weights(shape, trainer)),
            _gib(formulas.gradients(shape, trainer)),
            _gib(formulas.optimizer(shape, trainer)),
            f"{_gib(formulas.update_bytes(shape, trainer))} ({trainer.tokens:,})",
            f"{_gib(formulas.infer_bytes(shape, trainer, trainer.infer_tokens))} ({trainer.infer_tokens:,})",
            _reference(shape, trainer),
            ", ".join(_off_loaded(trainer)) or "nothing",
        )
    return table


def _off_loaded(trainer: Trainer) -> list[str]:
    held = {"weights": trainer.param_offload, "optimiser": trainer.optimizer_offload}
    return [what for what, off in held.items() if off or trainer.cpu_policy]


def _reference(shape: Shape, trainer: Trainer) -> str:
    """Weights of the reference model on the GPU: verl's FSDP workers have it in host memory, layers apart."""
    if not trainer.ref_tokens:
        return "-"
    held = 0 if trainer.engine == "fsdp" or trainer.ref_offload else formulas.weights(shape, trainer)
    return f"{_gib(held) if held else 'on host'} ({trainer.ref_tokens:,})"


def server_table(plan: PoolPlan) -> Table:
    """What each model's servers hold on a GPU."""
    table = Table(title=f"{_title(plan.needs)}: servers", title_justify="left")
    for column in ("model", "servers", "weights", "overhead", "KV cache", "tokens in it", "full-length sequences"):
        table.add_column(column)
    for model in plan.needs.models:
        server, setting = plan.servers[model.model_id], model.server
        table.add_row(
            model.model_id,
            f"{plan.needs.gpus // setting.gpus} x {setting.gpus} GPUs",
            _gib(server.weights),
            _gib(server.overhead),
            _gib(server.cache),
            f"{server.tokens * setting.replicas:,}",
            f"{server.sequences * setting.replicas:,} of {setting.length:,} tokens",
        )
    return table


def phase_table(plan: PoolPlan) -> Table:
    """The peak of each phase, what it is made of, and whether it fits."""
    table = Table(title=f"{_title(plan.needs)}: peak of each phase", title_justify="left")
    for column in ("phase", "peak", "fits", "of this"):
        table.add_column(column)
    for phase in plan.phases:
        name = phase.name if phase.model_id is None else f"{phase.name} ({phase.model_id})"
        share = phase.total / plan.memory
        verdict = "no" if share > 1 else "tight" if share > TIGHT else "yes"
        parts = ", ".join(f"{what} {_gib(size)}" for what, size in phase.parts if size)
        table.add_row(name, _gib(phase.total), verdict, parts, style="red" if verdict == "no" else None)
    return table


def step_table(steps: Sequence[ModelStep]) -> Table:
    """Rows, tokens, updates and weight syncs of a step."""
    table = Table(title="one step", title_justify="left")
    for column in ("model", "rows", "tokens at most", "updates", "weight syncs"):
        table.add_column(column)
    for step in steps:
        rows = (
            "the workflow doesn't tell"
            if step.rows is None
            else " to ".join(f"{n:,}" for n in dict.fromkeys(step.rows))
        )
        tokens = "-" if step.tokens is None else f"{step.tokens:,}"
        table.add_row(step.model_id, rows, tokens, str(step.updates), str(step.syncs))
    return table


def advice(plan: PoolPlan, prepared: Prepared) -> list[str]:
    """What doesn't fit in a pool, and the changes after which it does, as Hydra overrides."""
    if plan.fits:
        return []
    lines = []
    for phase in plan.over:
        whose = f" ({phase.model_id})" if phase.model_id else ""
        lines.append(
            f"pool {plan.needs.name}: {phase.name}{whose} needs {_gib(phase.total)} of {_gib(plan.memory)} GiB"
        )
    for model_id in plan.starved:
        lines.append(
            f"pool {plan.needs.name}: the KV cache of {model_id} ({_gib(plan.servers[model_id].cache)} GiB) holds no "
            "sequence of full length"
        )
    fixes = suggest(plan.needs, plan.memory)
    if fixes is None:
        lines.append(f"pool {plan.needs.name}: no change that plan knows is enough; take smaller models or larger GPUs")
    else:
        lines += [f"fix: {override(fix, plan.needs, prepared)} (now {_shown(fix.now)})" for fix in fixes]
    if own_pools(plan.needs, plan.memory):
        lines.append(f"or: {' '.join(_own_pool(plan.needs))} (a pool of its own for each model)")
    return lines


def override(fix: Fix, needs: PoolNeeds, prepared: Prepared) -> str:
    """A fix as an argument of main_ppo."""
    if fix.part == "pool":
        where = f"trainer.{fix.key}" if needs.name == OWN_POOL else f"drmas.pools.{needs.name}.{fix.key}"
    elif len(prepared.section.models) == 1 and not prepared.section.models[fix.model_id].actor_rollout_ref:
        where = f"actor_rollout_ref.{fix.key}"
    else:
        where = f"drmas.models.{fix.model_id}.actor_rollout_ref.{fix.key}"
    return f"++{where}={_shown(fix.then)}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else f"{value}"


def _own_pool(needs: PoolNeeds) -> list[str]:
    """Overrides that give every model but the first a pool of its own, of the same size."""
    size = f"{{n_gpus_per_node:{needs.n_gpus_per_node},nnodes:{needs.nnodes}}}"
    others = [model.model_id for model in needs.models[1:]]
    return [f"'++drmas.pools.{m}={size}' ++drmas.models.{m}.pool={m}" for m in others]
