"""The formulas: bytes of what training workers and servers hold on a GPU. All of them are estimates.

Pure: plain numbers in, bytes out. `shape.py` and `inputs.py` read the numbers from models and a configuration,
`pool.py` adds the bytes up, `fixes.py` looks for changes that make them fit, `command.py` prints. Exact (the tests hold
them against PyTorch): parameters, gradients, optimiser state, tensors saved for backward, bytes of a cached token.
Rounded up from experience: `CONTEXT` and the other constants below, and what a kernel needs while it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

GIB = 1024**3
FP32 = 4
CONTEXT = GIB // 2  # an accelerator context with NCCL buffers, one a process; also what a sleeping server keeps
CAPTURED = GIB // 2  # an awake server's CUDA graphs and allocator slack, beside its context
FUSED_CHUNK = 512  # tokens whose logits verl's fused kernels hold at a time (FusedLinearForPPO.chunk_size)

Engine = Literal["fsdp", "megatron"]


@dataclass(frozen=True)
class Shape:
    """A model's architecture in numbers; parameters are counted, not bytes.

    Attributes:
        parameters: All; a tied embedding counts once.
        trainable: Those with a gradient: all, or LoRA's adapters.
        layer: Those of the largest layer, FSDP's unit.
        rest: Those outside the layers (embedding, head, last norm), FSDP's root unit.
        largest: Those of the largest tensor.
        layers: Transformer layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        mlp: Width of the MLP that a token passes (mixture of experts: the chosen experts' widths together).
        experts: Experts that a token passes; 0: a dense MLP.
        norms: Widths of a layer's norms together, query and key norms included.
        norm_rows: Normalised vectors of a token in a layer: 1 a norm, a norm over heads 1 a head.
        vocabulary: Logits of a token.
    """

    parameters: int
    trainable: int
    layer: int
    rest: int
    largest: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    experts: int
    norms: int
    norm_rows: int
    vocabulary: int


@dataclass(frozen=True)
class Trainer:
    """How a model's training workers are set up; sizes of elements in bytes, lengths in tokens a GPU.

    Attributes:
        engine: FSDP (1 and 2 alike), or Megatron.
        fsdp2: FSDP's second version, which can keep all its state in host memory.
        gpus: Ranks: the GPUs of the pool.
        fsdp_size: GPUs that share one copy of the weights; below 1: all.
        tensor: Megatron's tensor parallel size.
        pipeline: Megatron's pipeline parallel size.
        context: Megatron's context parallel size.
        distributed_optimizer: Megatron's; its state is shared by the data-parallel ranks.
        weight_bytes: Of a stored weight; its gradient has the same.
        compute_bytes: Of an activation.
        reduce_bytes: Of a gradient while it is summed over ranks.
        states: Numbers that the optimiser keeps for a parameter.
        state_bytes: Of each.
        param_offload: Weights (and gradients) are in host memory while the model doesn't work.
        optimizer_offload: So is the optimiser state.
        cpu_policy: FSDP2's offload_policy: weights, gradients and state are always there.
        reshard: Gathered weights of a layer are dropped after its forward pass.
        defer_sync: Gradients aren't sharded before the last micro-batch.
        checkpointing: Layers keep their input only and run again in the backward pass.
        tokens: Of a micro-batch in an update.
        least: Of the longest row, which a micro-batch must hold.
        infer_tokens: Of a micro-batch of log-probs.
        ref_tokens: The same for the reference model; 0: there is none of its own.
        ref_offload: Megatron's reference model is in host memory while it doesn't work (FSDP's always is).
        flash: flash-attention's cross-entropy does the log-probs.
        fused: verl's fused kernels do, and logits exist for `FUSED_CHUNK` tokens only.
        scaled: Logits are divided by a temperature that isn't 1.
        entropy_loss: Updates need the entropy too (log-probs always do).
        entropy: How it is computed.
        entropy_chunk: Tokens of a chunk.
    """

    engine: Engine
    gpus: int
    tokens: int
    infer_tokens: int
    ref_tokens: int = 0
    least: int = 1
    fsdp2: bool = True
    fsdp_size: int = -1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    distributed_optimizer: bool = True
    weight_bytes: int = FP32
    compute_bytes: int = 2
    reduce_bytes: int = FP32
    states: int = 2
    state_bytes: int = FP32
    param_offload: bool = False
    optimizer_offload: bool = False
    cpu_policy: bool = False
    reshard: bool = True
    defer_sync: bool = False
    checkpointing: bool = True
    ref_offload: bool = True
    flash: bool = True
    fused: bool = False
    scaled: bool = False
    entropy_loss: bool = False
    entropy: Literal["eager", "chunked", "compiled"] = "compiled"
    entropy_chunk: int = 2048

    @property
    def shards(self) -> int:
        """GPUs that a weight is split over."""
        if self.engine == "megatron":
            return self.tensor * self.pipeline
        return self.gpus if not 0 < self.fsdp_size < self.gpus else self.fsdp_size


@dataclass(frozen=True)
class Server:
    """How a model's servers are set up.

    Attributes:
        share: gpu_memory_utilization: of a GPU's memory.
        kv_bytes: Bytes of KV cache, where they are set instead.
        own_overhead: The share doesn't cover what a pass needs (SGLang's mem_fraction_static), where vLLM's does.
        tensor: Tensor parallel size.
        pipeline: Pipeline parallel size.
        replicas: Data parallel size.
        weight_bytes: Of a weight.
        cache_bytes: Of a number in the KV cache.
        length: Longest sequence in tokens.
        batched: Most tokens of a forward pass.
        sequences: Most sequences at a time.
        sleeps: It gives its memory back while the pool trains.
        bucket: Bytes of the buffer that new weights arrive in.
    """

    length: int
    share: float = 0.5
    kv_bytes: int | None = None
    own_overhead: bool = False
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    weight_bytes: int = 2
    cache_bytes: int = 2
    batched: int = 8192
    sequences: int = 256
    sleeps: bool = True
    bucket: int = 0

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.replicas


# -- what a training worker holds --------------------------------------------------------------------------------------


def weights(shape: Shape, trainer: Trainer) -> int:
    """Bytes of a rank's share of the weights."""
    return 0 if trainer.cpu_policy else _part(shape.parameters * trainer.weight_bytes, trainer.shards)


def gradients(shape: Shape, trainer: Trainer) -> int:
    """Bytes of a rank's gradients; FSDP has them during an update only, Megatron keeps their buffer (float32)."""
    if trainer.engine == "megatron":
        return _part(shape.trainable * FP32, trainer.shards)
    whole = shape.trainable * trainer.reduce_bytes if trainer.defer_sync else 0
    return whole + (0 if trainer.cpu_policy else _part(shape.trainable * trainer.weight_bytes, trainer.shards))


def optimizer(shape: Shape, trainer: Trainer) -> int:
    """Bytes of a rank's optimiser state.

    PyTorch's AdamW keeps two numbers of the weight's dtype for each. Megatron's keeps a float32 copy of the weight as
    well, 12 bytes a parameter, which its distributed optimiser splits over the data-parallel ranks.
    """
    if trainer.engine == "megatron":
        copies = trainer.gpus // trainer.shards if trainer.distributed_optimizer else 1
        return _part(shape.trainable * FP32 * (trainer.states + 1), trainer.shards * max(1, copies))
    return 0 if trainer.cpu_policy else _part(shape.trainable * trainer.states * trainer.state_bytes, trainer.shards)


def gathered(shape: Shape, trainer: Trainer, *, train: bool) -> int:
    """Bytes of weights that FSDP gathers for a pass: two layers (one ahead of the other) and the root unit, and in
    training the whole gradient of one layer before it is summed and sharded.
    """
    if trainer.engine == "megatron":
        return 0
    layers = 2 * shape.layer if trainer.reshard else shape.parameters - shape.rest
    own = shape.layer * (trainer.compute_bytes + trainer.reduce_bytes) if train else 0
    return (layers + shape.rest) * trainer.compute_bytes + own


def layer_bytes(shape: Shape, compute: int) -> int:
    """Bytes a token that a layer without checkpointing saves for backward.

    Counted operation by operation in transformers' Llama and Qwen3 (the accounting of Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models", 2022, for grouped queries, RMSNorm and SwiGLU, and kernels
    that keep no attention scores): a norm its input in float32, the normalised vector and its scale; linear layers
    their inputs; attention q, k, v, its output and a float32 sum a head; SwiGLU gate, activation, up and product. With
    experts, the inputs and outputs of the chosen ones too.
    """
    norms = shape.norms * (FP32 + compute) + FP32 * shape.norm_rows
    attention = compute * shape.head_dim * 2 * (shape.heads + shape.kv_heads) + FP32 * shape.heads
    experts = 2 * compute * shape.hidden * shape.experts
    return norms + 2 * compute * shape.hidden + attention + 4 * compute * shape.mlp + experts


def outer_bytes(shape: Shape, compute: int) -> int:
    """Bytes a token saved outside the layers, logits apart: ids, rotary tables, last norm, the head's input."""
    return 8 + 2 * compute * shape.head_dim + shape.hidden * (FP32 + 2 * compute) + FP32


def body_bytes(shape: Shape, trainer: Trainer) -> int:
    """Bytes that a micro-batch of an update saves for backward, logits apart."""
    compute, tensor = trainer.compute_bytes, trainer.tensor
    layer = compute * shape.hidden if trainer.checkpointing else layer_bytes(shape, compute)
    return _part(trainer.tokens * (shape.layers * layer + outer_bytes(shape, compute)), tensor)


def logit_bytes(shape: Shape, trainer: Trainer, tokens: int, *, train: bool) -> int:
    """Bytes of a micro-batch's logits and of what log-probs and entropy make of them, at their peak.

    What verl's `prepare_model_outputs` does, per token and entry of the vocabulary, as PyTorch's MemTracker counts it
    in float32 (bfloat16: with CUDA's autocast, which takes softmax and logsumexp in float32):

    * the logits in the compute dtype, and once more divided by a temperature;
    * update: flash-attention's cross-entropy writes the gradient over the logits. Without it, bfloat16 logits get a
      float32 log-softmax; float32 ones the rows' gradients, these stacked, and the gathered entries' gradient, when the
      undivided logits are gone;
    * entropy in an update: its gradient if one compiled kernel does it all, else softmax, product and float32 copies,
      in chunks those that backward needs;
    * entropy with log-probs: nothing compiled, else softmax and its product (and a float32 copy), of one chunk or all.
    """
    compute, single = trainer.compute_bytes, trainer.compute_bytes >= FP32
    logits = compute * (2 if trainer.scaled else 1)
    if trainer.fused:
        return _part(min(tokens, FUSED_CHUNK) * (logits + 2 * FP32) * shape.vocabulary, trainer.tensor)
    if train:
        size = tokens * (logits if trainer.flash else 4 * FP32 if single else logits + FP32)
        if trainer.entropy_loss:
            compiled = compute * (2 if trainer.flash else 1)  # cross-entropy can't write over the logits any more
            copies = {
                "compiled": compiled,
                "chunked": FP32 * (1 if single else 2),
                "eager": FP32 * (3 if single else 5),
            }
            size += tokens * copies[trainer.entropy]
    else:
        rows = {"compiled": 0, "chunked": min(tokens, trainer.entropy_chunk), "eager": tokens}[trainer.entropy]
        size = tokens * logits + rows * FP32 * (2 if single else 3)
    return _part(size * shape.vocabulary, trainer.tensor)


def update_bytes(shape: Shape, trainer: Trainer) -> int:
    """Bytes of activations at the peak of an update: after the forward pass, or, with checkpointing, when a layer has
    run again, whichever is more.
    """
    head = logit_bytes(shape, trainer, trainer.tokens, train=True)
    again = _part(trainer.tokens * layer_bytes(shape, trainer.compute_bytes), trainer.tensor)
    return body_bytes(shape, trainer) + (max(head, again) if trainer.checkpointing else head)


def pass_bytes(shape: Shape, compute: int, tokens: int) -> int:
    """Bytes of a forward pass without gradient at its peak: within the MLP, or within a norm."""
    experts = 2 * compute * shape.hidden * shape.experts
    mlp = compute * (3 * shape.mlp + 4 * shape.hidden) + experts
    norm = shape.hidden * (2 * compute + 3 * FP32)
    return tokens * (max(mlp, norm) + 2 * compute * shape.head_dim + 8)


def infer_bytes(shape: Shape, trainer: Trainer, tokens: int) -> int:
    """Bytes of activations at the peak of a log-prob pass: within a layer, or at the logits."""
    inside = _part(pass_bytes(shape, trainer.compute_bytes, tokens), trainer.tensor)
    residual = tokens * shape.hidden * trainer.compute_bytes
    return max(inside, residual + logit_bytes(shape, trainer, tokens, train=False))


# -- what a server holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerPlan:
    """Bytes on each GPU of a server, and what its cache holds.

    Attributes:
        weights: Of the model.
        overhead: Of a forward pass, logits, context and CUDA graphs.
        cache: Of the KV cache; below 0 if the share doesn't even hold the rest.
        total: All of it.
        tokens: Tokens that the cache holds.
        sequences: Sequences of full length that it holds.
    """

    weights: int
    overhead: int
    cache: int
    total: int
    tokens: int
    sequences: int


def token_cache_bytes(shape: Shape, server: Server) -> int:
    """Bytes of KV cache a token on each GPU of a server: key and value of every layer; more than there are for layers
    that cache less (sliding windows, latent attention).
    """
    heads = max(1, shape.kv_heads // server.tensor)
    return 2 * math.ceil(shape.layers / server.pipeline) * heads * shape.head_dim * server.cache_bytes


def serve(shape: Shape, server: Server, memory: int, *, context: int = CONTEXT) -> ServerPlan:
    """What a server holds on each of its GPUs.

    vLLM takes `share` of the memory and caches in what weights and a profiled pass leave of it.

    Args:
        shape: The model.
        server: Its servers.
        memory: Bytes of a GPU.
        context: Bytes of a process's context; 0 on a CPU.
    """
    held = _part(shape.parameters * server.weight_bytes, server.tensor * server.pipeline)
    forward = _part(pass_bytes(shape, server.weight_bytes, server.batched), server.tensor)
    overhead = forward + 2 * FP32 * server.sequences * shape.vocabulary + (context + CAPTURED if context else 0)
    if server.kv_bytes is not None:
        cache = server.kv_bytes
    else:
        cache = int(server.share * memory) - held - (0 if server.own_overhead else overhead)
    tokens = max(0, cache) // token_cache_bytes(shape, server)
    return ServerPlan(held, overhead, cache, held + overhead + max(0, cache), tokens, tokens // server.length)


def _part(size: int, parts: int) -> int:
    return -(-size // parts)
