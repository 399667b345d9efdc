"""Cards of trained models, and what a check of the run found in that of an RL run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratoon.config import resolved_yaml
from ratoon.config.pretrain import PretrainConfig
from ratoon.config.rl import RLConfig
from ratoon.loop.certificate import Certificate
from ratoon.observe.files import write_atomically
from ratoon.observe.run_folder import RunFolder

CARD = "README.md"
_CERTIFICATE = "**Certificate:** "


def hub_card(config: PretrainConfig | RLConfig, tag: str, text: str) -> str:
    """A model's page in the hub's format: what it says of the model, and its configuration."""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [ratoon, {tag}]
---

# {config.name}

{text}

<details><summary>Configuration</summary>

```yaml
{resolved_yaml(config).rstrip()}
```

</details>
"""


def write_card(folder: RunFolder, config: RLConfig, figures: Mapping[str, Any]) -> None:
    """Write the saved model's card; `figures` are those of the summary."""
    write_atomically(folder.model / CARD, rl_card(config, figures))


def rl_card(config: RLConfig, figures: Mapping[str, Any]) -> str:
    """What a reader of the model's page must know."""
    algorithm = config.algorithm
    before, after = figures["reward_before"], figures["reward_after"]
    reward = "not measured" if before is None or after is None else f"{before:.3f} → {after:.3f}"
    if figures["reward_diff_stderr"] is not None:
        reward += f" (standard error of the difference {figures['reward_diff_stderr']:.3f})"
    text = f"""{config.model.path.name}, trained with Ratoon by reinforcement learning \
({algorithm.name}).

| | |
| --- | --- |
| steps | {config.steps:,}, of {algorithm.prompts_per_step} prompts with {algorithm.group_size} \
responses each |
| temperature | {config.sampling.temperature:g} |
| held-out reward | {reward} |
| numerics | {figures["numerics"]} |

{_CERTIFICATE}not made; `ratoon verify` checks the stored responses against the stored weights."""
    return hub_card(config, "reinforcement-learning", text)


def certify_card(folder: RunFolder, certificate: Certificate) -> None:
    """Say in the saved model's card what a check found; nothing where there is no such card."""
    card = folder.model / CARD
    if not card.is_file():
        return
    lines = card.read_text(encoding="utf-8").split("\n")
    places = [i for i, line in enumerate(lines) if line.startswith(_CERTIFICATE)]
    if places:
        lines[places[0]] = _CERTIFICATE + certificate_line(certificate)
        write_atomically(card, "\n".join(lines))


def certificate_line(certificate: Certificate) -> str:
    """A check in one sentence."""
    tokens, responses = certificate.total("tokens"), certificate.total("responses")
    text = f"{tokens:,} tokens of {responses:,} stored responses were selected again"
    if not certificate.holds:
        return f"NOT VERIFIED: {text}, and not all is as the run says (certificate.json)."
    exact = certificate.total("equal_bits") == tokens
    how = "all log-probabilities have the same bits" if exact else "the rest is rounding"
    flips = certificate.total("flips")
    same = "every one is the same" if flips == 0 else f"all but {flips:,} near-ties are the same"
    p_value = certificate.uniformity[1]
    return f"verified: {text}; {same}, {how}, uniformity p = {p_value:.2f} (certificate.json)."
