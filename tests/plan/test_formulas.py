"""The formulas against what PyTorch reports for small models: weights, gradients, optimiser, activations, KV cache."""

import itertools

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipes.cpu_arithmetic.tiny_model import build
from verl_drmas.plan import formulas
from verl_drmas.plan.formulas import GIB, Server, Trainer, serve, token_cache_bytes
from verl_drmas.plan.shape import count

TOKENS = 192
STYLES = ("llama", "qwen3")


def tiny(style, dtype=torch.float32, checkpointing=False):
    """A real model on the CPU, with the attention that a CPU run uses."""
    model = build(style)[0].to(dtype).train()
    model.set_attn_implementation("sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def trainer(**changes):
    plain = {"engine": "fsdp", "gpus": 1, "tokens": TOKENS, "infer_tokens": TOKENS, "checkpointing": False}
    return Trainer(**plain | changes)


def forward(model, tokens=TOKENS, **options):
    ids = torch.randint(0, 60, (1, tokens), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, position_ids=torch.arange(tokens)[None], **{"use_cache": False, **options})


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def saved(model, tokens=TOKENS):
    """Bytes of the storages that a forward pass saves for backward, each once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(model, tokens)
    assert output.logits.untyped_storage().data_ptr() not in seen  # logits are the loss's
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_weights_gradients_and_adam_after_a_real_step(style, dtype):
    model = tiny(style, dtype)
    adam = torch.optim.AdamW(model.parameters())
    forward(model).logits.float().logsumexp(-1).mean().backward()
    adam.step()
    shape, each = count(model.config), trainer(weight_bytes=dtype.itemsize, state_bytes=dtype.itemsize)
    assert formulas.weights(shape, each) == size(model.parameters())
    assert formulas.gradients(shape, each) == size(p.grad for p in model.parameters())
    states = [t for state in adam.state.values() for t in state.values() if t.dim()]  # without the step counters
    assert formulas.optimizer(shape, each) == size(states)


def test_an_optimisers_states_and_lora():
    model = get_peft_model(
        tiny("llama"), LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "down_proj"])
    )
    adam = torch.optim.AdamW(model.parameters())
    forward(model).logits.logsumexp(-1).mean().backward()
    adam.step()
    shape = count(build("llama")[0].config, rank=4, targets=["q_proj", "down_proj"])
    assert 0 < shape.trainable < shape.parameters / 20
    assert formulas.gradients(shape, trainer()) == size(p.grad for p in model.parameters() if p.grad is not None)
    states = [t for state in adam.state.values() for t in state.values() if t.dim()]
    assert formulas.optimizer(shape, trainer()) == size(states)


def test_parts_of_the_state():
    shape = count(build("llama")[0].config)
    whole, quarter = trainer(), trainer(gpus=4)
    for part in (formulas.weights, formulas.gradients, formulas.optimizer):
        assert part(shape, quarter) == part(shape, whole) / 4
        assert part(shape, trainer(gpus=4, fsdp_size=2)) == part(shape, whole) / 2
        assert part(shape, trainer(cpu_policy=True)) == 0
    # Deferred, the gradients are whole on each rank until the last micro-batch.
    assert formulas.gradients(shape, trainer(gpus=4, defer_sync=True)) == shape.parameters * 5
    gathered = formulas.gathered(shape, quarter, train=False)
    assert gathered == 2 * (2 * shape.layer + shape.rest)
    assert formulas.gathered(shape, trainer(gpus=4, reshard=False), train=False) == 2 * shape.parameters > gathered
    assert formulas.gathered(shape, quarter, train=True) == gathered + 6 * shape.layer


def test_megatron_keeps_eighteen_bytes_a_parameter_and_splits_them():
    """Megatron's own table: 18 bytes a parameter with bf16 weights, or 6 + 12/d with the distributed optimizer."""
    shape = count(build("llama")[0].config)

    def state(**changes):
        each = trainer(engine="megatron", weight_bytes=2, **changes)
        parts = (formulas.weights, formulas.gradients, formulas.optimizer)
        return sum(part(shape, each) for part in parts) / shape.parameters

    assert state() == 18
    assert state(gpus=4) == 6 + 12 / 4
    assert state(gpus=4, distributed_optimizer=False) == 18
    assert state(gpus=8, tensor=2, pipeline=2) == (6 + 12 / 2) / 4
    body = {t: formulas.body_bytes(shape, trainer(engine="megatron", tensor=t)) for t in (1, 2)}
    assert body[2] == body[1] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_saved_activations_are_exact(style, dtype):
    model = tiny(style, dtype)
    predicted = formulas.body_bytes(count(model.config), trainer(compute_bytes=dtype.itemsize))
    assert predicted == saved(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_checkpointing_saves_a_layers_input(style, dtype):
    model = tiny(style, dtype, checkpointing=True)
    shape, compute = count(model.config), dtype.itemsize
    predicted = formulas.body_bytes(shape, trainer(checkpointing=True, compute_bytes=compute))
    # The rotary tables reach a layer as keyword arguments, which checkpointing holds where hooks don't see them.
    tables = 2 * compute * shape.head_dim * TOKENS
    assert predicted == saved(model) + tables
    assert predicted < formulas.body_bytes(shape, trainer(compute_bytes=compute)) / 8


def test_saved_activations_of_experts_are_near():
    """Within 15%: what a router and a dispatch of tokens save depends on the kernel, and small widths show it most."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    model = Qwen3MoeForCausalLM(config).train()
    model.set_attn_implementation("sdpa")
    shape = count(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert formulas.body_bytes(shape, trainer(compute_bytes=4)) == pytest.approx(saved(model), rel=0.15)


WIDE = LlamaConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def peak(model, run):
    """Most bytes that tensors take while `run` runs, the model's among them."""
    run()  # what is made once is there
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        run()
    (totals,) = tracker.get_tracker_snapshot("peak").values()
    return totals["Total"]


@pytest.mark.parametrize(
    ("train", "entropy", "scaled"),
    [
        (train, entropy, scaled)
        for train, entropy, scaled in itertools.product((True, False), (None, "eager", "chunked"), (True, False))
        if train or entropy  # verl computes the entropy with every log-prob pass
    ],
)
def test_the_peak_where_logits_dominate(train, entropy, scaled):
    """verl's own log-probs and entropy on a vocabulary 64 times the width.

    What is measured is between the plan without gradients (backward has made few when logits are at their peak) and
    with all of them; exact (0.2%: small tensors that come and go) where there are none. Backward through chunks frees a
    chunk before it is at the next, which the plan leaves out: up to 7% at six chunks.
    """
    from verl.utils.torch_functional import (
        entropy_from_logits,
        entropy_from_logits_with_chunking,
        logprobs_from_logits_v2,
    )

    model = LlamaForCausalLM(WIDE).train()
    model.set_attn_implementation("sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss():
        output = forward(model)  # held to the end, as verl holds it
        logits = output.logits[0]
        logits = logits / torch.full((TOKENS, 1), 0.7) if scaled else logits
        terms = [logprobs_from_logits_v2(logits, torch.zeros(TOKENS, dtype=torch.int64))]
        if entropy == "eager":
            terms.insert(0, entropy_from_logits(logits))
        if entropy == "chunked":
            terms.insert(0, entropy_from_logits_with_chunking(logits, 32))
        return sum(terms).mean()

    def update():
        loss().backward()
        model.zero_grad()

    shape = count(WIDE)
    each = trainer(
        compute_bytes=4,
        checkpointing=True,
        flash=False,
        scaled=scaled,
        entropy_loss=entropy is not None,
        entropy=entropy or "eager",
        entropy_chunk=32,
    )
    held = formulas.weights(shape, each)
    if train:
        measured = peak(model, update) - held
        least = formulas.update_bytes(shape, each)
        assert (0.93 if entropy == "chunked" else 0.998) * least <= measured <= least + formulas.gradients(shape, each)
    else:
        with torch.no_grad():
            measured = peak(model, loss) - held
        assert formulas.infer_bytes(shape, each, TOKENS) == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_a_pass_without_gradient_at_its_peak(style, dtype):
    """Where a layer dominates; within 2%: some small tensors come and go."""
    model = tiny(style, dtype)
    compute = dtype.itemsize
    shape, each = count(model.config), trainer(weight_bytes=compute, compute_bytes=compute)
    with torch.no_grad():
        measured = peak(model, lambda: forward(model).logits)
    assert formulas.weights(shape, each) + formulas.infer_bytes(shape, each, TOKENS) == pytest.approx(
        measured, rel=0.02
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_whole_update(checkpointing):
    """State, activations and all, where layers dominate: within 8% above what PyTorch counts.

    The plan has all gradients and the most activations at once; the peak has the gradients of what came so far.
    """
    model = tiny("llama", checkpointing=checkpointing)
    adam = torch.optim.AdamW(model.parameters())

    def update():
        forward(model, 1024).logits.logsumexp(-1).mean().backward()
        adam.step()
        adam.zero_grad()

    measured = peak(model, update) + size(t for state in adam.state.values() for t in state.values() if t.dim())
    shape = count(model.config)
    each = trainer(tokens=1024, compute_bytes=4, checkpointing=checkpointing)
    parts = (formulas.weights, formulas.gradients, formulas.optimizer, formulas.update_bytes)
    assert 1 <= sum(part(shape, each) for part in parts) / measured <= 1.08


@pytest.mark.parametrize("style", STYLES)
def test_cached_bytes_of_a_token_are_those_of_a_real_cache(style):
    model = tiny(style)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        forward(model, past_key_values=cache, use_cache=True)
    held = size(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    shape = count(model.config)
    assert token_cache_bytes(shape, Server(length=1, cache_bytes=4)) * TOKENS == held
    assert token_cache_bytes(shape, Server(length=1, cache_bytes=1)) * TOKENS == held / 4
    # Two GPUs split the heads; four would share each of the two.
    assert token_cache_bytes(shape, Server(length=1, cache_bytes=4, tensor=2)) * TOKENS == held / 2
    assert token_cache_bytes(shape, Server(length=1, cache_bytes=4, tensor=4)) * TOKENS == held / 2
    assert token_cache_bytes(shape, Server(length=1, cache_bytes=4, pipeline=2)) * TOKENS == held / 2


def test_a_server_caches_in_what_its_share_leaves():
    shape = count(build("llama")[0].config)
    server = Server(length=100, share=0.5)
    held = serve(shape, server, 80 * GIB)
    assert held.total == 40 * GIB == held.weights + held.overhead + held.cache
    assert held.weights == shape.parameters * 2
    assert held.tokens == held.cache // token_cache_bytes(shape, server) and held.sequences == held.tokens // 100
    fixed = serve(shape, Server(length=100, kv_bytes=1000 * token_cache_bytes(shape, server)), 80 * GIB, context=0)
    assert (fixed.tokens, fixed.sequences) == (1000, 10) and fixed.total < GIB
    # SGLang's share is for weights and cache only.
    static = serve(shape, Server(length=100, share=0.5, own_overhead=True), 80 * GIB)
    assert static.cache == 40 * GIB - static.weights and static.total == 40 * GIB + static.overhead
    assert serve(shape, Server(length=100, share=0.01), 80 * GIB).sequences == 0
