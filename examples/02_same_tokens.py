"""Generate a group of responses plainly and with draft trees: same tokens, fewer forward passes.

The model is tiny and random. Its texts mean nothing, but siblings of a group repeat each other,
which is what the suffix drafter uses. Run: `python examples/02_same_tokens.py`
"""

import torch

from ratoon.drafter.suffix import SuffixDrafter
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.tiny import random_decoder
from ratoon.records import Completion, DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import RuleTuner

VOCAB, GROUP, MAX_TOKENS, MAX_LENGTH = 100, 8, 100, 128
TREE = Strategy(depth=4, branching=3, beam=3, budget=12, use_learned=False)


def make_decoder() -> Decoder:
    """A deep and thin model; sharper logits than at birth, about 0.8 nats of entropy a token."""
    config = DecoderConfig("llama", VOCAB, 64, 128, 12, num_heads=4, num_kv_heads=2, head_dim=16)
    decoder = random_decoder(config, seed=0)
    decoder.norm.weight.data.mul_(3)
    return decoder


def requests() -> list[Request]:
    """One group: the same prompt, another sample in each key."""
    return [
        Request(
            key=DrawKey(1, Stream.TRAIN, round=1, dataset="example", row=0, sample=sample),
            prompt_ids=tuple(range(20)),
            max_tokens=MAX_TOKENS,
            eos_ids=(2,),
            params=SamplingParams(temperature=1.0),
        )
        for sample in range(GROUP)
    ]


def generate(engine: RolloutEngine) -> dict[int, Completion]:
    """Responses by sample."""
    for request in requests():
        engine.submit(request)
    found = []
    while engine.has_work:
        found += [finished.completion for finished in engine.step()]
    return {completion.key.sample: completion for completion in found}


def make_engine(model: InferenceModel, strategy: Strategy, exact: bool) -> RolloutEngine:
    """An engine with an empty index: one that had seen these responses would just repeat them."""
    nodes, suffix = TREE.budget + 1, SuffixDrafter(2)
    drafting = Drafting(num_rows=2, vocab_limit=VOCAB, max_nodes=nodes, suffix=suffix)
    return RolloutEngine(
        model, max_rows=2, max_length=MAX_LENGTH, vocab_limit=VOCAB, drafting=drafting,
        tuner=RuleTuner(lambda num_live: strategy), confirm=exact,
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = InferenceModel(make_decoder(), num_positions=256, dtype=DTYPES[fast_dtype()])
    exact = check_invariance(model).holds
    print("numerics:", "invariant" if exact else "tolerant: rounding may flip a near-tie")
    results = {}
    for name, strategy in (("plain", PLAIN), ("speculative", TREE)):
        engine = make_engine(model, strategy, exact)
        results[name] = generate(engine)
        stats = engine.take_stats()
        print(f"{name:12}: {stats.tokens} tokens in {len(stats.live_batch)} forward passes")
    assert results["plain"] == results["speculative"] or not exact
    print("tokens and log-probabilities are the same:", results["plain"] == results["speculative"])
