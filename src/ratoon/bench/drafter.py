"""Speed of drafter training, against a plain implementation of the same step.

Tokens are columns trained on: pairs that predict a response token. Context is not counted. One
thread in a process like a run's workers; shapes of SmolLM2-135M with a draft vocabulary of 8192;
random states, since time does not depend on their values.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.bench.intervals import median_interval
from ratoon.bench.timing import worker_pool
from ratoon.drafter.data_buffer import DataBuffer, Sample
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.spot_trainer import SpotSession, SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.models.compiling import has_compiler
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.decoder import DecoderConfig, apply_rope
from ratoon.observe.provenance import provenance

TARGET = DecoderConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100_000.0,
)
DRAFT_VOCABULARY = 8192
WINDOW = 512
PROMPT_TOKENS = 60
NUM_SAMPLES = 64
# Half as many optimizer steps for the same tokens: faster, and a drafter learns less from them.
LARGE_BATCH_TOKENS = 512

# Until kernels are prepared for every size of matrix that slices make.
WARM_UP_STEPS = 12


def run(rounds: int = 9, *, steps_per_round: int = 4, seed: int = 0) -> dict[str, Any]:
    """Time `rounds` interleaved rounds of each arm; JSON values.

    Arms: one unroll step, the same with larger optimizer steps, training's default, all three with
    a compiled optimizer where a compiler is found, and the plain implementation with one unroll
    step. `tokens_per_s` of each has a bootstrap
    interval of the median, as has `speedup`, one unroll step over plain in the same round.
    `pieces_ms` are the default's times between two questions whether to stop: stopping waits for at
    most one of them.
    """
    with worker_pool() as process:
        measured = process.submit(_run, rounds, steps_per_round, seed).result()
    return {**measured, "provenance": provenance(seed)}


def _run(rounds: int, steps_per_round: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    options = TrainerOptions(compute_dtype=DTYPES[fast_dtype()])
    drafter, embedding, head = _random_drafter()
    pieces: list[float] = []
    trained = {
        "unroll_1": replace(options, unroll=1),
        "unroll_1_large": replace(options, unroll=1, batch_tokens=LARGE_BATCH_TOKENS),
        "default": options,
    }
    if has_compiler():
        compiled = {f"{name}_compiled": replace(o, compiled=True) for name, o in trained.items()}
        trained |= compiled
    arms: dict[str, Callable[[], float]] = {
        name: _spot_arm(drafter, embedding, head, o, pieces if name == "default" else [], seed)
        for name, o in trained.items()
    }
    arms["plain"] = _plain_arm(drafter, embedding, head, options, seed)
    for name, arm in arms.items():
        for _ in range(1 if name == "plain" else WARM_UP_STEPS):
            arm()
    pieces.clear()
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            tokens, seconds = 0.0, time.perf_counter()
            for _ in range(1 if name == "plain" else steps_per_round):
                tokens += arm()
            rates[name].append(tokens / (time.perf_counter() - seconds))
    speedup = [ours / plain for ours, plain in zip(rates["unroll_1"], rates["plain"], strict=True)]
    milliseconds = torch.tensor(pieces, dtype=torch.float64) * 1e3
    return {
        "benchmark": "drafter",
        "config": _config(options),
        "tokens_per_s": {name: median_interval(values) for name, values in rates.items()},
        "speedup": median_interval(speedup),
        "pieces_ms": {
            "median": float(milliseconds.median()),
            "p99": float(milliseconds.quantile(0.99)),
            "max": float(milliseconds.max()),
        },
    }


def _config(options: TrainerOptions) -> dict[str, Any]:
    return {
        "model": "SmolLM2-135M shapes",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "window": WINDOW,
        "batch_tokens": options.batch_tokens,
        "micro_tokens": options.micro_tokens,
        "default_unroll": options.unroll,
        "default_deep_stride": options.deep_stride,
        "compute_dtype": str(options.compute_dtype),
        "threads": torch.get_num_threads(),
        "compiler": has_compiler(),
    }


def _random_drafter() -> tuple[Eagle3Drafter, Tensor, Tensor]:
    """A drafter, the target's embedding and its head rows, with random values."""
    drafter = Eagle3Drafter(DrafterConfig.for_target(TARGET, DRAFT_VOCABULARY, WINDOW))
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.02)
    embedding = torch.empty(TARGET.vocab_size, TARGET.hidden_size).normal_(std=0.1)
    dtype = DTYPES[fast_dtype()]
    return drafter, embedding.to(dtype), embedding[:DRAFT_VOCABULARY].to(dtype)


def _filled_buffer(head: Tensor, seed: int) -> DataBuffer:
    """Responses of 40 to 300 tokens after a prompt."""
    buffer = DataBuffer(100_000, seed=seed)
    buffer.begin_step(1, head)
    width = TARGET.hidden_size
    for uid in range(NUM_SAMPLES):
        length = PROMPT_TOKENS + int(torch.randint(40, 301, ()))
        sample = Sample(
            uid=(uid,),
            ids=torch.randint(0, TARGET.vocab_size, (length,)),
            features=torch.randn(length - 1, 3 * width).to(head.dtype),
            hidden=torch.randn(length - 1, width).to(head.dtype),
            prompt_len=PROMPT_TOKENS,
            policy_version=1,
        )
        buffer.add(sample)
    return buffer


def _copy_of(drafter: Eagle3Drafter) -> Eagle3Drafter:
    copy = Eagle3Drafter(drafter.config)
    copy.load_state_dict(drafter.state_dict())
    return copy


def spot_session(options: TrainerOptions, seed: int) -> SpotSession:
    """A session of drafter training that never ends by itself, on random values."""
    torch.manual_seed(seed)
    return _session(*_random_drafter(), options, seed)


def _session(
    drafter: Eagle3Drafter, embedding: Tensor, head: Tensor, options: TrainerOptions, seed: int
) -> SpotSession:
    trainer = DrafterTrainer(_copy_of(drafter), options)
    trainer.set_embedding(embedding)
    buffer = _filled_buffer(head, seed)
    spot = SpotTrainer(trainer, buffer, lambda *_: None, publish_every=1_000_000)
    return spot.start(lambda: False)


def _spot_arm(
    drafter: Eagle3Drafter,
    embedding: Tensor,
    head: Tensor,
    options: TrainerOptions,
    pieces: list[float],
    seed: int,
) -> Callable[[], float]:
    """One optimizer step per call; appends the time of each piece to `pieces`."""
    session = _session(drafter, embedding, head, options, seed)
    trainer = session.trainer

    def step() -> float:
        before, tokens = trainer.step, trainer.tokens
        while trainer.step == before:
            start = time.perf_counter()
            session.run_once()
            pieces.append(time.perf_counter() - start)
        return trainer.tokens - tokens

    return step


def _plain_arm(
    drafter: Eagle3Drafter, embedding: Tensor, head: Tensor, options: TrainerOptions, seed: int
) -> Callable[[], float]:
    """The same step as one would write it first: modules, autocast, a loop over documents."""
    module = _copy_of(drafter)
    documents = itertools.cycle(_filled_buffer(head, seed).samples())
    optimizer = torch.optim.AdamW(
        module.parameters(), options.learning_rate, options.betas, weight_decay=0.0
    )
    rope = module.config.rope_table(2048, torch.float32)

    def step() -> float:
        samples, tokens = [], 0
        while tokens < options.batch_tokens:
            samples.append(next(documents))
            tokens += samples[-1].num_queries
        optimizer.zero_grad()
        for sample in samples:
            with torch.autocast("cpu", head.dtype, enabled=head.dtype != torch.float32):
                logits = _plain_logits(module, sample, embedding, rope)
                teacher = F.linear(sample.hidden[sample.first_query + 1 :], head)
            (_plain_loss(logits, teacher) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), options.clip_norm)
        optimizer.step()
        return tokens

    return step


def _plain_logits(module: Eagle3Drafter, sample: Sample, embedding: Tensor, rope: Tensor) -> Tensor:
    """Draft logits of a whole document's response, one unroll step."""
    config, layer = module.config, module.midlayer
    pairs = len(sample.ids) - 2
    hidden = module.fc(sample.features[:pairs])
    embedded = layer.input_layernorm(embedding[sample.ids[1:-1]].float())
    joined = torch.cat([embedded, layer.hidden_norm(hidden)], -1)
    attention = layer.self_attn
    query, key, value = (
        linear(joined).view(pairs, -1, config.head_dim)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = rope[:, :pairs, None]
    query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
    share = config.num_heads // config.num_kv_heads
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.repeat_interleave(share, 1).transpose(0, 1)[None],
        value.repeat_interleave(share, 1).transpose(0, 1)[None].to(query.dtype),
        is_causal=True,
    )
    x = hidden + attention.o_proj(attended[0].transpose(0, 1).reshape(pairs, -1))
    normed = layer.post_attention_layernorm(x)
    mlp = layer.mlp
    x = x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    logits: Tensor = module.lm_head(module.norm(x))
    return logits[sample.first_query :]


def _plain_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Hybrid loss over whole float32 rows, with the metrics that one logs at each step."""
    p, student = teacher.float().softmax(-1), logits.float().log_softmax(-1)
    kl = F.kl_div(student, p, reduction="sum")
    tv = (student.exp() - p).abs().sum() / 2
    (logits.argmax(-1) == teacher.argmax(-1)).float().mean().item()
    return kl + tv
