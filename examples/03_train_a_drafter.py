"""Train a drafter on what the target just said, and count forward passes before and after.

The engine keeps the target's states of every committed token, so training needs no further forward
of the target. Run: `python examples/03_train_a_drafter.py`
"""

import torch

from ratoon.drafter.data_buffer import DataBuffer, Sample
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.spot_trainer import SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.decoder import DecoderConfig
from ratoon.models.tiny import random_decoder
from ratoon.records import DrawKey, Request, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import RuleTuner

VOCAB, ROWS, LENGTH, STEPS = 100, 16, 96, 60
TREE = Strategy(depth=3, branching=3, beam=3, budget=12, use_suffix=False)
TARGET = random_decoder(
    DecoderConfig("llama", VOCAB, 64, 128, 8, num_heads=4, num_kv_heads=2, head_dim=16), seed=0
)
CONFIG = DrafterConfig.for_target(TARGET.config, draft_vocab_size=VOCAB, window=64)
MODEL = InferenceModel(TARGET, num_positions=256, dtype=DTYPES[fast_dtype()], taps=CONFIG.taps)


def generate(rows: range, drafter: Eagle3Drafter | None) -> tuple[list[Finished], float]:
    """Responses to prompts of three tokens, and tokens per row and forward pass."""
    slots = TREE.beam * TREE.depth
    learned = LearnedDrafter(CONFIG, num_rows=ROWS, num_positions=256, num_tree_slots=slots)
    drafting = Drafting(num_rows=ROWS, vocab_limit=VOCAB, max_nodes=13, learned=learned)
    if drafter is not None:
        drafting.load(drafter, MODEL.embedding)
    strategy = PLAIN if drafter is None else TREE
    engine = RolloutEngine(
        MODEL, max_rows=ROWS, max_length=LENGTH, vocab_limit=VOCAB, drafting=drafting,
        tuner=RuleTuner(lambda num_live: strategy), collect=True,
    )  # fmt: skip
    for row in rows:
        key = DrawKey(seed=1, stream=Stream.TRAIN, round=1, dataset="example", row=row, sample=0)
        prompt = (row % VOCAB, row // VOCAB, 3)
        engine.submit(Request(key, prompt, max_tokens=LENGTH - 3, eos_ids=()))
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    stats = engine.take_stats()
    return finished, stats.tokens / stats.rows_decoded


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    drafter = Eagle3Drafter.from_target(CONFIG, TARGET, torch.arange(VOCAB))
    trainer = DrafterTrainer(drafter, TrainerOptions(learning_rate=2e-3))
    trainer.set_embedding(MODEL.embedding)
    buffer = DataBuffer(max_tokens=65536, seed=0)
    buffer.begin_step(policy_version=0, head_rows=TARGET.head_weight[drafter.draft_ids])
    for done in generate(range(64), None)[0]:
        text = done.completion
        ids = torch.tensor(text.prompt_ids + text.token_ids)
        uid = (text.key.row,)
        buffer.add(Sample(uid, ids, done.features, done.hidden, len(text.prompt_ids), 0))
    print(f"{len(buffer)} responses collected, {buffer.tokens} tokens")
    held_out = range(1000, 1016)
    print(f"untrained drafter: {generate(held_out, drafter)[1]:.2f} tokens per forward pass")
    spot = SpotTrainer(trainer, buffer, lambda *_: None, publish_every=10**6)
    report = spot.start(should_stop=lambda: trainer.step >= STEPS).run()
    first, last = report.metrics[0].acceptance[0], report.metrics[-1].acceptance[0]
    print(f"trained {report.steps} steps: chance of a drawn draft {first:.2f} -> {last:.2f}")
    print(f"trained drafter:   {generate(held_out, drafter)[1]:.2f} tokens per forward pass")
