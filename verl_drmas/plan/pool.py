"""The peaks of a pool's GPUs: which models of the pool hold what, in each phase of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_drmas.plan import formulas
from verl_drmas.plan.formulas import ServerPlan, Shape, Trainer

Parts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Model:
    """One model's needs: its architecture, its training workers (None: frozen, served only) and its servers.

    Attributes:
        model_id: The model.
        shape: Its architecture.
        trainer: Its training workers.
        server: Its servers.
    """

    model_id: str
    shape: Shape
    trainer: Trainer | None
    server: formulas.Server

    @property
    def resident(self) -> int:
        """Bytes of training state that stay on a GPU while other models work."""
        return sum(size for _, size in self.idle())

    def idle(self) -> Iterator[tuple[str, int]]:
        """What is behind `resident`."""
        trainer = self.trainer
        if trainer is None:
            return
        if not trainer.param_offload:
            yield "weights", formulas.weights(self.shape, trainer)
            if trainer.engine == "megatron":
                yield "gradients", formulas.gradients(self.shape, trainer)
        if not trainer.optimizer_offload:
            yield "optimiser", formulas.optimizer(self.shape, trainer)
        if trainer.engine == "megatron" and trainer.ref_tokens and not trainer.ref_offload:
            yield "reference", formulas.weights(self.shape, trainer)


@dataclass(frozen=True)
class Phase:
    """What a GPU of the pool holds at the peak of a phase.

    Attributes:
        name: `rollout`, `log-probs`, `update` or `weight sync`.
        model_id: The model that works, the others being idle; None: all.
        parts: What, and how many bytes.
    """

    name: str
    model_id: str | None
    parts: Parts

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class PoolNeeds:
    """A pool and its models.

    Attributes:
        name: Of the pool.
        n_gpus_per_node: GPUs on each node.
        nnodes: Nodes.
        models: In the order in which they are synchronised.
        context: Bytes of a process's context; 0 on a CPU.
    """

    name: str
    n_gpus_per_node: int
    nnodes: int
    models: tuple[Model, ...]
    context: int = formulas.CONTEXT

    @property
    def gpus(self) -> int:
        return self.n_gpus_per_node * self.nnodes


@dataclass(frozen=True)
class PoolPlan:
    """A pool's estimate.

    Attributes:
        needs: What it was made from.
        memory: Bytes of a GPU.
        servers: By model id.
        phases: Each phase's peak.
    """

    needs: PoolNeeds
    memory: int
    servers: dict[str, ServerPlan]
    phases: tuple[Phase, ...]

    @property
    def over(self) -> list[Phase]:
        """The phases that need more than there is."""
        return [phase for phase in self.phases if phase.total > self.memory]

    @property
    def starved(self) -> list[str]:
        """The models whose cache holds no sequence of full length; vLLM refuses to start."""
        return [model_id for model_id, server in self.servers.items() if server.sequences < 1]

    @property
    def fits(self) -> bool:
        return not self.over and not self.starved


def plan_pool(needs: PoolNeeds, memory: int) -> PoolPlan:
    """Estimate a pool.

    In rollout all servers are awake and every trainer holds what it doesn't off-load. In log-probs and updates one
    trainer works and the servers sleep. In the weight sync one model after another is sent, the servers of those before
    it being awake again.

    Args:
        needs: The pool.
        memory: Bytes of each GPU.
    """
    servers = {m.model_id: formulas.serve(m.shape, m.server, memory, context=needs.context) for m in needs.models}
    awake = {model_id: server.total for model_id, server in servers.items()}
    asleep = {m.model_id: needs.context if m.server.sleeps else awake[m.model_id] for m in needs.models}
    trained = [m for m in needs.models if m.trainer is not None]
    phases = [Phase("rollout", None, _shared(needs, None, awake))]
    for model in trained:
        parts = _shared(needs, model, asleep)
        phases.append(Phase("log-probs", model.model_id, parts + _log_probs(model)))
        phases.append(Phase("update", model.model_id, parts + _update(model)))
    state = dict(asleep)
    for model in trained:
        if model.server.sleeps:
            state[model.model_id] += servers[model.model_id].weights
        phases.append(Phase("weight sync", model.model_id, _shared(needs, model, state) + _sync(model)))
        state[model.model_id] = awake[model.model_id]
    return PoolPlan(needs, memory, servers, tuple(phases))


def _shared(needs: PoolNeeds, works: Model | None, servers: dict[str, int]) -> Parts:
    """What is there beside the model that works: contexts, servers, the state of the others."""
    contexts = needs.context * sum(m.trainer is not None for m in needs.models)
    idle = sum(m.resident for m in needs.models if m is not works)
    return (("contexts", contexts), ("servers", sum(servers.values())), ("idle models", idle))


def _state(model: Model, trainer: Trainer, *, optimizer: bool) -> Parts:
    """The state of the model that works: weights, and what it doesn't off-load or loads for this."""
    stays = dict(model.idle())
    state = stays | {"weights": formulas.weights(model.shape, trainer)}
    if optimizer:
        state["optimiser"] = formulas.optimizer(model.shape, trainer)
        state["gradients"] = formulas.gradients(model.shape, trainer)
    return tuple(state.items())


def _log_probs(model: Model) -> Parts:
    shape, trainer = model.shape, model.trainer
    activations = formulas.infer_bytes(shape, trainer, trainer.infer_tokens)
    if trainer.ref_tokens:  # its own pass; FSDP's reference weights come from host memory layer by layer
        activations = max(activations, formulas.infer_bytes(shape, trainer, trainer.ref_tokens))
    gathered = formulas.gathered(shape, trainer, train=False)
    return (*_state(model, trainer, optimizer=False), ("gathered", gathered), ("activations", activations))


def _update(model: Model) -> Parts:
    """The larger of backward and the optimiser's step, which works on all parameters at once and needs one more copy
    of them (PyTorch's `foreach`; Megatron's kernel works in place).
    """
    shape, trainer = model.shape, model.trainer
    state = _state(model, trainer, optimizer=True)
    gathered, backward = formulas.gathered(shape, trainer, train=True), formulas.update_bytes(shape, trainer)
    step = 0
    if trainer.engine == "fsdp" and not trainer.cpu_policy:
        step = -(-shape.trainable * trainer.weight_bytes // trainer.shards)
    if step > gathered + backward:
        return (*state, ("optimiser step", step))
    return (*state, ("gathered", gathered), ("activations", backward))


def _sync(model: Model) -> Parts:
    """Weights as they are sent: the bucket, and the largest tensor whole, as it is and in the servers' dtype."""
    trainer, server = model.trainer, model.server
    whole = model.shape.largest * (trainer.weight_bytes + server.weight_bytes)
    return (*_state(model, trainer, optimizer=False), ("sending", server.bucket + whole))
