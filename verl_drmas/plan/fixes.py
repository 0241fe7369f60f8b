"""Changes of the configuration that make a pool fit, from harmless to costly; each is tried before it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_drmas.config import TOGETHER
from verl_drmas.plan import formulas
from verl_drmas.plan.pool import Model, PoolNeeds, PoolPlan, plan_pool

STEP = 256  # tokens between the micro-batches that are tried
GPUS_A_NODE = 8


@dataclass(frozen=True)
class Fix:
    """A change of one key.

    Attributes:
        model_id: Whose it is; None: the pool's.
        part: `trainer`, `server` or `pool`: where the number stands among the needs.
        field: Its name there.
        value: What it becomes there.
        key: The configuration's key, under the model's section.
        now: The key's value.
        then: The value that fits.
    """

    model_id: str | None
    part: str
    field: str
    value: Any
    key: str
    now: Any
    then: Any


Move = Callable[[], Iterator[list[Fix]]]


def suggest(needs: PoolNeeds, memory: int) -> list[Fix] | None:
    """Changes, of those known here, after which the pool fits: switches before sizes before more GPUs, of one kind if
    that is enough, and none is needless.

    Args:
        needs: A pool.
        memory: Bytes of a GPU.

    Returns:
        The changes; empty: it fits as it is; None: nothing known here is enough.
    """
    if not lacking(plan_pool(needs, memory)):
        return []
    flags, numbers, costly = _flags(needs), _numbers(needs), _costly(needs)
    mild = [*flags, _all(flags), *numbers, _all(flags + numbers)]
    for moves in [*mild, _all(flags + numbers + costly)]:
        fixes = _take(needs, memory, moves)
        if not lacking(plan_pool(apply(needs, fixes), memory)):
            return _without_needless(needs, memory, fixes)
    return None


def _take(needs: PoolNeeds, memory: int, moves: list[Move]) -> list[Fix]:
    """Make the best choice of each move in turn, if it helps, until the pool fits."""
    fixes: list[Fix] = []
    for move in moves:
        before = lacking(plan_pool(apply(needs, fixes), memory))
        if not before:
            break
        best, least = fixes, before
        for choice in move():
            replaced = {(fix.model_id, fix.field) for fix in choice}
            after = [fix for fix in fixes if (fix.model_id, fix.field) not in replaced] + choice
            left = lacking(plan_pool(apply(needs, after), memory))
            if left < least:
                best, least = after, left
            if not left:
                break
        fixes = best
    return fixes


def _without_needless(needs: PoolNeeds, memory: int, fixes: list[Fix]) -> list[Fix]:
    for fix in list(fixes):  # an earlier one may be needless after a later one
        without = [f for f in fixes if f is not fix]
        if not lacking(plan_pool(apply(needs, without), memory)):
            fixes = without
    return fixes


def lacking(plan: PoolPlan) -> int:
    """Bytes that are missing: over all phases, and for one full sequence in each server's cache."""
    over = sum(phase.total - plan.memory for phase in plan.over)
    for model in plan.needs.models:
        server = plan.servers[model.model_id]
        if server.sequences < 1:
            over += model.server.length * formulas.token_cache_bytes(model.shape, model.server) - server.cache
    return over


def apply(needs: PoolNeeds, fixes: Iterable[Fix]) -> PoolNeeds:
    """The pool's needs after some changes."""
    for fix in fixes:
        if fix.part == "pool":
            needs = dataclasses.replace(needs, **{fix.field: fix.value})
            models = tuple(
                dataclasses.replace(m, trainer=m.trainer and dataclasses.replace(m.trainer, gpus=needs.gpus))
                for m in needs.models
            )
        else:
            models = tuple(_changed(m, fix) if m.model_id == fix.model_id else m for m in needs.models)
        needs = dataclasses.replace(needs, models=models)
    return needs


def own_pools(needs: PoolNeeds, memory: int) -> bool:
    """True if each model of a shared pool fits on as many GPUs of its own."""
    alone = [dataclasses.replace(needs, models=(model,)) for model in needs.models]
    return len(alone) > 1 and all(plan_pool(one, memory).fits for one in alone)


def _changed(model: Model, fix: Fix) -> Model:
    part = dataclasses.replace(getattr(model, fix.part), **{fix.field: fix.value})
    return dataclasses.replace(model, **{fix.part: part})


def _all(kinds: list[list[Move]]) -> list[Move]:
    return [move for kind in kinds for move in kind]


def _flags(needs: PoolNeeds) -> list[list[Move]]:
    """Switches that cost some time and no capacity, kind by kind."""
    return [
        [partial(_flag, needs, model, field, key, value) for model in needs.models]
        for field, key, value in (
            ("sleeps", "rollout.free_cache_engine", True),
            ("optimizer_offload", "actor.{engine}.optimizer_offload", True),
            ("checkpointing", "model.enable_gradient_checkpointing", True),
            ("defer_sync", "actor.{engine}.use_no_sync_for_gradient_accumulation", False),
            ("reshard", "actor.{engine}.reshard_after_forward", True),
            ("param_offload", "actor.{engine}.param_offload", True),
        )
    ]


def _numbers(needs: PoolNeeds) -> list[list[Move]]:
    """Sizes, kind by kind; a move yields alternatives, the nearest to the present value first."""
    kinds: list[list[Move]] = [
        [partial(_fewer_tokens, model, field, key) for model in needs.models]
        for field, key in (
            ("infer_tokens", "rollout.log_prob_max_token_len_per_gpu"),
            ("ref_tokens", "ref.log_prob_max_token_len_per_gpu"),
            ("tokens", "actor.ppo_max_token_len_per_gpu"),
        )
    ]
    kinds.append([partial(_shares, needs), *(partial(_share, needs, model) for model in needs.models)])
    kinds.append([partial(_fixed_cache, model) for model in needs.models])
    return kinds


def _costly(needs: PoolNeeds) -> list[list[Move]]:
    """What slows every update down, or takes more machines."""
    host = [m for m in needs.models if m.trainer is not None and m.trainer.fsdp2]
    policy = "actor.{engine}.offload_policy"
    return [[partial(_flag, needs, m, "cpu_policy", policy, True) for m in host], [partial(_gpus, needs)]]


def _flag(needs: PoolNeeds, model: Model, field: str, key: str, value: bool) -> Iterator[list[Fix]]:
    part = "server" if field == "sleeps" else "trainer"
    owner = getattr(model, part)
    if owner is None or getattr(owner, field) == value or (field == "sleeps" and not needs.context):
        return  # on a CPU there is no sleep mode
    megatron = part == "trainer" and owner.engine == "megatron"
    if megatron and field in ("defer_sync", "reshard", "cpu_policy"):
        return
    if megatron and field == "checkpointing":
        key = "actor.megatron.override_transformer_config.recompute_granularity"
        yield [Fix(model.model_id, part, field, value, key, None, "full")]
        return
    key = key.format(engine="megatron" if megatron else "fsdp_config")
    yield [Fix(model.model_id, part, field, value, key, not value, value)]


def _fewer_tokens(model: Model, field: str, key: str) -> Iterator[list[Fix]]:
    if model.trainer is None:
        return
    now = getattr(model.trainer, field)
    for tokens in range((now - 1) // STEP * STEP, 0, -STEP):
        if tokens < model.trainer.least:
            return
        yield [Fix(model.model_id, "trainer", field, tokens, key, now, tokens)]


def _shares(needs: PoolNeeds) -> Iterator[list[Fix]]:
    """All servers of the pool give up the same part of their memory."""
    models = [m for m in needs.models if m.server.kv_bytes is None]
    for percent in range(99, 0, -1):
        yield [_share_fix(m, int(m.server.share * percent) / 100) for m in models]


def _share(needs: PoolNeeds, model: Model) -> Iterator[list[Fix]]:
    if model.server.kv_bytes is not None:
        return
    others = sum(m.server.share for m in needs.models if m is not model and m.server.kv_bytes is None)
    shares = (i / 100 for i in range(1, 100) if i / 100 + others <= TOGETHER)
    for share in sorted(shares, key=lambda s: abs(s - model.server.share)):
        yield [_share_fix(model, share)]


def _share_fix(model: Model, share: float) -> Fix:
    key, now = "rollout.gpu_memory_utilization", model.server.share
    return Fix(model.model_id, "server", "share", share, key, now, share)


def _fixed_cache(model: Model) -> Iterator[list[Fix]]:
    """A cache of a set size that holds one full sequence, and no more than fits."""
    now = model.server.kv_bytes
    if now is None:
        return
    sequence = model.server.length * formulas.token_cache_bytes(model.shape, model.server)
    key = "rollout.engine_kwargs.vllm.kv_cache_memory_bytes"
    for size in (now // 2**halvings for halvings in range(1, 64)):
        if size < sequence:
            break
        yield [Fix(model.model_id, "server", "kv_bytes", size, key, now, size)]
    yield [Fix(model.model_id, "server", "kv_bytes", sequence, key, now, sequence)]


def _gpus(needs: PoolNeeds) -> Iterator[list[Fix]]:
    """Twice as many GPUs, four times, ...: first on a node, then nodes."""
    a_node, nodes = needs.n_gpus_per_node, needs.nnodes
    for _ in range(6):
        if a_node * 2 <= GPUS_A_NODE:
            a_node *= 2
        else:
            nodes *= 2
        sizes = {"n_gpus_per_node": a_node, "nnodes": nodes}
        yield [
            Fix(None, "pool", name, value, name, getattr(needs, name), value)
            for name, value in sizes.items()
            if value != getattr(needs, name)
        ]
