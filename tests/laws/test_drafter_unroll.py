"""Training's unrolled, packed forward is the step-by-step computation that serving does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.drafter.data_buffer import Sample, Slice
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.micro_batch import MicroBatch
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.trainer import DrafterTrainer, StepMetrics, TrainerOptions
from ratoon.models.decoder import DecoderConfig, apply_rope

WINDOW = 5
UNROLL = 3
VOCABULARY = 40
DRAFT_IDS = torch.arange(0, VOCABULARY, 2)


def make_drafter(window: int = WINDOW, seed: int = 0) -> Eagle3Drafter:
    target = DecoderConfig("llama", VOCABULARY, 16, 24, 8, 4, 2, 4)
    base = DrafterConfig.for_target(target, VOCABULARY, window)
    values = {name: getattr(base, name) for name in base.__slots__}
    drafter = Eagle3Drafter(DrafterConfig(**(values | {"draft_vocab_size": len(DRAFT_IDS)})))
    drafter.set_vocabulary(DRAFT_IDS)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (1 + 0.3 * noise if parameter.dim() == 1 else 0.4 * noise).double()
    return drafter


def make_sample(uid: int, prompt_len: int, response_len: int, version: int = 1) -> Sample:
    generator = torch.Generator().manual_seed(100 + uid)
    n = prompt_len + response_len
    return Sample(
        uid=(uid,),
        ids=torch.randint(0, VOCABULARY, (n,), generator=generator),
        features=torch.randn(n - 1, 48, generator=generator).double(),
        hidden=torch.randn(n - 1, 16, generator=generator).double(),
        prompt_len=prompt_len,
        policy_version=version,
    )


def target_tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(VOCABULARY, 16, generator=generator).double()
    return embedding, embedding[DRAFT_IDS] * 0.5


class ServedDrafter:
    """The forward contract written as a loop over single tokens, one document at a time."""

    def __init__(self, drafter: Eagle3Drafter, embedding: Tensor) -> None:
        self.p = {
            name: p.detach().clone().requires_grad_() for name, p in drafter.named_parameters()
        }
        self.config = drafter.config
        self.embedding = embedding
        self.rope = drafter.config.rope_table(200, torch.float64)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt((x * x).mean() + self.config.rms_norm_eps)
        return x * scale * self.p[f"{name}.weight"]

    def project(self, hidden: Tensor, token: int, position: int) -> list[Tensor]:
        joined = torch.cat(
            [
                self.norm(self.embedding[token], "midlayer.input_layernorm"),
                self.norm(hidden, "midlayer.hidden_norm"),
            ]
        )
        cos, sin = self.rope[:, position]
        parts = []
        for part in "qkv":
            x = (self.p[f"midlayer.self_attn.{part}_proj.weight"] @ joined).view(-1, 4)
            parts.append(x if part == "v" else apply_rope(x, cos, sin))
        return parts

    def layer(
        self, hidden: Tensor, query: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        heads = []
        for head in range(self.config.num_heads):
            group = head // (self.config.num_heads // self.config.num_kv_heads)
            scores = torch.stack([query[head] @ key[group] for key in keys]) / 2.0
            weights = scores.softmax(0)
            heads.append(sum(w * value[group] for w, value in zip(weights, values, strict=True)))
        x = hidden + self.p["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        y = self.norm(x, "midlayer.post_attention_layernorm")
        gate = F.silu(self.p["midlayer.mlp.gate_proj.weight"] @ y)
        up = self.p["midlayer.mlp.up_proj.weight"] @ y
        return x + self.p["midlayer.mlp.down_proj.weight"] @ (gate * up)

    def chain(self, sample: Sample, pair: int, steps: int) -> list[Tensor]:
        """Draft logits of `steps` steps from `pair`, fed with the sample's own tokens."""
        ids = sample.ids.tolist()
        keys, values = [], []
        for t in range(max(0, pair - self.config.window + 1), pair + 1):
            hidden = self.p["fc.weight"] @ sample.features[t]
            query, key, value = self.project(hidden, ids[t + 1], t)
            keys.append(key)
            values.append(value)
        logits = []
        for step in range(steps):
            if step:
                query, key, value = self.project(hidden, ids[pair + 1 + step], pair + step)
                keys.append(key)
                values.append(value)
            hidden = self.layer(hidden, query, keys, values)
            logits.append(self.p["lm_head.weight"] @ self.norm(hidden, "norm"))
        return logits


def served_loss(
    served: ServedDrafter,
    samples: list[Sample],
    head: Tensor,
    options: TrainerOptions,
    phase: int = 0,
) -> Tensor:
    """The loss summed over pairs and steps and divided by the summed weights."""
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        last = len(sample.ids) - 1
        for pair in range(len(sample.ids) - 2):
            if pair + 2 < sample.prompt_len:
                continue
            is_deep = (pair + phase) % options.deep_stride == 0
            steps = min(options.unroll if is_deep else 1, last - pair - 1)
            for step, logits in enumerate(served.chain(sample, pair, steps)):
                p = (head @ sample.hidden[pair + 1 + step] / options.temperature).softmax(0)
                q = (logits / options.temperature).softmax(0)
                kl = (p * (p.log() - q.log())).sum()
                tv = (p - q).abs().sum() / 2
                weight = options.step_decay**step * (options.deep_stride if step else 1)
                total = total + weight * (kl + options.tv_weight * tv)
                weights += weight
    return total / weights


def train_once(
    drafter: Eagle3Drafter,
    batches: list[list[Slice]],
    options: TrainerOptions,
    multiple: int = 1,
) -> tuple[StepMetrics, dict[str, Tensor]]:
    """Loss, and the gradient by name before clipping, of one optimizer step."""
    trainer = DrafterTrainer(drafter, options)
    embedding, head = target_tables()
    trainer.set_embedding(embedding)
    for slices in batches:
        batch = MicroBatch.build(
            slices,
            options.unroll,
            drafter.config.window,
            stride=options.deep_stride,
            multiple=multiple,
        )
        trainer.micro_step(batch, head)
    metrics = trainer.optimizer_step()
    assert options.clip_norm > metrics.grad_norm
    return metrics, trainer._layout.named(trainer._gradient)


def whole(sample: Sample, phase: int = 0) -> Slice:
    return Slice(sample, sample.first_query, sample.num_queries, phase)


def options_fp64(**changes: float) -> TrainerOptions:
    values = {"unroll": UNROLL, "deep_stride": 1, "temperature": 0.7, "tv_weight": 0.6}
    values |= {"clip_norm": 1e9} | changes
    return TrainerOptions(compute_dtype=torch.float64, **values)


SAMPLES = [make_sample(1, 3, 6), make_sample(2, 1, 2), make_sample(3, 9, 4), make_sample(4, 2, 1)]


@pytest.mark.parametrize(("stride", "phase"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_unrolled_packed_training_equals_drafting_one_token_at_a_time(
    stride: int, phase: int
) -> None:
    options = options_fp64(deep_stride=stride)
    served = ServedDrafter(make_drafter(), target_tables()[0])
    expected = served_loss(served, SAMPLES, target_tables()[1], options, phase)
    expected.backward()
    slices = [whole(sample, phase) for sample in SAMPLES]
    metrics, gradient = train_once(make_drafter(), [slices], options)
    assert metrics.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for name, value in gradient.items():
        torch.testing.assert_close(value, served.p[name].grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("multiple", [1, 16])
def test_cutting_documents_into_slices_and_padding_them_changes_nothing(multiple: int) -> None:
    options = options_fp64(deep_stride=2)
    reference, expected = train_once(make_drafter(), [[whole(s) for s in SAMPLES]], options)
    pieces = [
        Slice(s, s.first_query + start, min(2, s.num_queries - start))
        for s in SAMPLES
        for start in range(0, s.num_queries, 2)
    ]
    pieces = pieces[::-1]
    metrics, gradient = train_once(make_drafter(), [pieces[:2], pieces[2:]], options, multiple)
    assert metrics.loss == pytest.approx(reference.loss, rel=1e-12)
    assert metrics.tokens == reference.tokens == sum(s.num_queries for s in SAMPLES)
    for name, value in gradient.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_document_does_not_see_its_neighbours() -> None:
    options = options_fp64()
    embedding, _ = target_tables()
    trainer = DrafterTrainer(make_drafter(), options)
    trainer.set_embedding(embedding)
    batch = MicroBatch.build([whole(s) for s in SAMPLES], UNROLL, WINDOW)
    trainer._extend_rope(batch.longest + UNROLL)
    count = SAMPLES[0].num_queries
    with torch.no_grad():
        packed = trainer._model.head_inputs(embedding, batch, trainer._rope)
        single = MicroBatch.build([whole(SAMPLES[0])], UNROLL, WINDOW)
        expected = trainer._model.head_inputs(embedding, single, trainer._rope)
    firsts = [part[:count] for part in packed.split(batch.step_rows)]
    torch.testing.assert_close(torch.cat(firsts), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("prompt_len", [1, 2, 3, 6])
@pytest.mark.parametrize("response_len", [1, 2, 5])
def test_loss_counts_exactly_the_response_tokens(prompt_len: int, response_len: int) -> None:
    sample = make_sample(11, prompt_len, response_len)
    if sample.num_queries < 1:
        assert prompt_len + response_len < 3
        return
    batch = MicroBatch.build([whole(sample)], 2, WINDOW)
    predicted = [
        (torch.arange(sample.num_queries)[valid] + sample.first_query + 2 + step).tolist()
        for step, valid in enumerate(batch.valid.split(batch.step_rows))
    ]
    response = list(range(prompt_len, prompt_len + response_len))
    first = max(prompt_len, 2)  # Nothing comes before pair 0, which predicts token 2.
    assert predicted[0] == [t for t in response if t >= first]
    assert predicted[1] == [t for t in response if t >= first + 1]


def test_teacher_of_a_prediction_is_the_state_one_token_before_it() -> None:
    sample = make_sample(12, 3, 5)
    batch = MicroBatch.build([Slice(sample, 2, 3)], 2, WINDOW)
    # Columns 2, 3, 4 predict tokens 4, 5, 6 and then 5, 6, 7 (the last).
    torch.testing.assert_close(batch.teacher_hidden, sample.hidden[3:7], rtol=0, atol=0)
    assert batch.teacher_rows.tolist() == [0, 1, 2, 1, 2, 3]
    assert batch.valid.all()
    assert batch.next_ids[:3].tolist() == sample.ids[3:6].tolist()
    assert batch.deep_ids.tolist() == [sample.ids[4:7].tolist()]


def test_the_serving_drafter_computes_what_training_computed() -> None:
    drafter, (embedding, _) = make_drafter(), target_tables()
    trainer = DrafterTrainer(drafter, options_fp64())
    trainer.set_embedding(embedding)
    for sample in (make_sample(21, 4, 14), make_sample(22, 2, 5)):
        batch = MicroBatch.build([whole(sample)], UNROLL, WINDOW)
        trainer._extend_rope(batch.longest + UNROLL)
        with torch.no_grad():
            inputs = trainer._model.head_inputs(embedding, batch, trainer._rope)
            trained = (inputs @ trainer._model.head.T).view(UNROLL, sample.num_queries, -1)
        for column in range(sample.num_queries - UNROLL + 1):
            pair = sample.first_query + column
            served = LearnedDrafter(
                drafter.config,
                num_rows=1,
                num_positions=100,
                num_tree_slots=UNROLL,
                dtype=torch.float64,
            )
            served.load(drafter, embedding)
            served.observe(
                sample.features[None, : pair + 1],
                sample.ids[None, 1 : pair + 2],
                torch.arange(pair + 1)[None],
                torch.tensor([pair + 1]),
            )
            torch.testing.assert_close(served.root(1)[0, 0], trained[0, column])
            for step in range(1, UNROLL):
                token = sample.ids[pair + 1 + step].view(1, 1)
                logits = served.advance(torch.zeros(1, 1, dtype=torch.int64), token)
                torch.testing.assert_close(logits[0, 0], trained[step, column])
