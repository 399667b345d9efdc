"""What makes a drafter good: recipes trained on the same responses, compared on others.

Each recipe changes one thing of the default. A drafter's worth is the tokens that a coupled tree
yields per verification at temperature 1; its cost is the processor time of its training, which is
stated beside it. Results are stored one by one, so that a study that was interrupted goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ratoon.bench.corpus import Corpus, open_source
from ratoon.drafter.model import default_taps
from ratoon.errors import ConfigError
from ratoon.observe.files import digest, write_atomically
from ratoon.observe.provenance import provenance
from ratoon.offline.recorded import Source, entropy, record, select_taps
from ratoon.offline.responses import DEPTH, Responses, wide_tree
from ratoon.offline.training import Recipe, train
from ratoon.rollout.native.engine import Finished
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import CoupledProposer

NODES = 16


def recipes(num_layers: int, steps: int) -> dict[str, Recipe]:
    """The default and its variants, by name; every one sees about as many tokens."""
    low, middle, high = default_taps(num_layers)
    base = Recipe(steps=steps, taps=(low, middle, high))
    options = base.options

    def training(**changes: Any) -> Recipe:
        changed = replace(options, **changes)
        count = round(steps * options.batch_tokens / changed.batch_tokens)
        return replace(base, options=changed, steps=count)

    return {
        "default": base,
        "taps: late": replace(base, taps=(high - 4, high - 2, high)),
        "taps: early": replace(base, taps=(low, middle // 2, middle)),
        "taps: no early one": replace(base, taps=(middle - 4, middle, high)),
        "start: random": replace(base, from_target=False),
        "unroll 1": training(unroll=1),
        "unroll 2": training(unroll=2),
        "unroll 6": training(unroll=6),
        "every column deep": training(deep_stride=1),
        "loss: KL": training(loss="kl"),
        "loss: TV": training(loss="tv"),
        "vocabulary 2,048": replace(base, vocabulary=2048),
        "vocabulary 16,384": replace(base, vocabulary=16384),
        "batch 128": training(batch_tokens=128, micro_tokens=128),
        "batch 1,024": training(batch_tokens=1024),
        "learning rate 5e-4": training(learning_rate=5e-4),
        "learning rate 2e-3": training(learning_rate=2e-3),
        "window 64": replace(base, window=64),
    }


def run(
    model: Path,
    results: Path,
    corpus: Corpus,
    *,
    names: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train and compare what is not in `results` yet; JSON values, best first.

    `names` chooses among `recipes`; all by default. The same prompts and keys each time.

    Raises: ConfigError for a name that there is not; CheckpointError, DataError as `open_source`.
    """
    count = corpus.responses + corpus.train_responses
    source = open_source(model, corpus.text, count, taps=None)
    layers = source.decoder.config.num_layers
    wanted = recipes(layers, corpus.steps)
    unknown = sorted(set(names) - wanted.keys())
    if unknown:
        raise ConfigError(f"recipes {', '.join(unknown)}: give any of {', '.join(wanted)}")
    if names:
        wanted = {name: wanted[name] for name in names}
    taps = sorted({tap for recipe in wanted.values() for tap in recipe.taps or ()})
    source = source.with_taps(taps)
    setting = [model.name, asdict(corpus)]
    rows = {}
    missing = {}
    for name, recipe in wanted.items():
        file = results / f"recipe-{digest([setting, asdict(recipe)])[:12]}.json"
        if file.exists():
            rows[name] = json.loads(file.read_text(encoding="utf-8"))
        else:
            missing[name] = file
    if missing:
        say(f"drawing {corpus.responses} responses to compare on and {count} in all")
        held_out = record(source, range(corpus.responses), 1.0)
        seen = record(source, range(corpus.responses, count), 1.0)
        results.mkdir(parents=True, exist_ok=True)
        for name, file in missing.items():
            rows[name] = _row(source, held_out, seen, wanted[name])
            write_atomically(file, json.dumps(rows[name], indent=2) + "\n")
            say(f"{name}: {rows[name]['tokens_per_verification']:.3f} tokens per verification")
    best = sorted(rows, key=lambda name: -rows[name]["tokens_per_verification"])
    return {
        "benchmark": "recipes",
        "model": model.name,
        "prompts": corpus.prompts,
        "nodes": NODES,
        "depth": DEPTH,
        "rows": [{"recipe": name, **rows[name]} for name in best],
        "provenance": provenance(1),
    }


def _row(
    source: Source, held_out: Sequence[Finished], seen: Sequence[Finished], recipe: Recipe
) -> dict[str, Any]:
    own = source.with_taps(recipe.taps or source.model.taps)
    seen, held_out = (
        select_taps(part, source.model.taps, own.model.taps) for part in (seen, held_out)
    )
    started = time.process_time()
    drafter = train(own, seen, recipe).drafter
    seconds = time.process_time() - started
    responses = Responses(own, drafter, held_out, 1.0)
    counts = responses.walk(responses.tree_step(CoupledProposer, wide_tree(NODES), Calibration()))
    tokens = recipe.steps * recipe.options.batch_tokens
    return {
        "tokens_per_verification": counts.mean,
        "training_tokens": tokens,
        "training_s": seconds,
        "training_tokens_per_s": tokens / seconds,
        "entropy_per_token": entropy(held_out),
    }
