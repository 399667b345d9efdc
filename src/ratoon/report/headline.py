"""The top of the page: what came out, in two sentences and six figures."""

from __future__ import annotations

from html import escape
from typing import Any

from ratoon.report.load import Run
from ratoon.report.parts import card, left_out
from ratoon.report.pretraining import pretraining_cards
from ratoon.report.svg import number


def headline(run: Run) -> str:
    """The figures that the run is judged by, as cards."""
    if run.summary is None:
        return (
            pretraining_cards(run)
            or _fine_tuning(run)
            or left_out("summary.json is missing: the run has not ended")
        )
    s = run.summary
    cards = [
        _reward_card(s),
        _ratio_card("Rollout, with speculation", s["rollout_speedup"], "the same step replayed"),
        _ratio_card("Whole step", s["step_speedup"], "generation, reward and update together"),
        _tokens_card(s, run.certificate),
        _idle_card(s),
        _acceptance_card(s),
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in s.get("notes", []))
    return (
        f'<p class="lead">{_lead(s)}</p><div class="cards">{"".join(cards)}</div>'
        + _run_line(s)
        + (f'<ul class="notes small muted">{notes}</ul>' if notes else "")
    )


def _fine_tuning(run: Run) -> str:
    """Cards of a run that has no summary because it only fine-tunes; empty for any other."""
    losses = [("Loss on completions", "sft/loss"), ("Held-out loss", "sft/eval_loss")]
    cards = []
    for title, name in losses:
        if points := run.series(name):
            first, last = points[0][1], points[-1][1]
            value = f"<small>{first:.3f} →</small> {last:.3f}"
            cards.append(card(title, value, "nats per token, first and last step"))
    if points := run.series("sft/tokens_per_s"):
        speeds = sorted(speed for _, speed in points)
        cards.append(card("Speed", number(speeds[len(speeds) // 2]), "tokens per second, median"))
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _lead(s: dict[str, Any]) -> str:
    """The result in two sentences, losses said as plainly as gains."""
    sentences = []
    before, after, error = s["reward_before"], s["reward_after"], s["reward_diff_stderr"]
    if before is not None and after is not None and error is not None:
        word = "rose" if after > before else "fell"
        if abs(after - before) <= 2 * error:
            word = "did not change by more than the noise:"
        sentences.append(f"Reward on held-out prompts {word} from {before:.3f} to {after:.3f}.")
    ratio, same = s["rollout_speedup"], s["tokens_identical"]
    if ratio is not None and same is not None:
        words = (
            f"in {ratio:.2f} times the time" if ratio >= 1 else f"in only {ratio:.2f} of the time"
        )
        tokens = "exactly the same tokens" if same else "other tokens, which must never happen,"
        sentences.append(f"The same rollout without speculation gave {tokens} {words}.")
    return escape(" ".join(sentences))


def _run_line(s: dict[str, Any]) -> str:
    facts = []
    if isinstance(seconds := s["seconds"], int | float):
        facts.append(f"{seconds / 60:.1f} minutes")
    for key, word in (("steps", "RL steps"), ("workers", "workers")):
        if s.get(key) is not None:
            facts.append(f"{s[key]} {word}")
    if s["numerics"]:
        flips = f", {s['flips']} flips" if s["flips"] else ""
        facts.append(f"numerics {s['numerics']}{flips}")
    if isinstance(entropy := s["entropy_per_token"], int | float):
        facts.append(f"entropy {number(entropy)} nats per token")
    return f'<p class="small muted">{escape(" · ".join(facts))}</p>'


def _reward_card(s: dict[str, Any]) -> str:
    before, after, error = s["reward_before"], s["reward_after"], s["reward_diff_stderr"]
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return card("Held-out reward", "–", "not measured")
    value = f"<small>{number(before)} →</small> {number(after)}"
    gain = after - before
    if not isinstance(error, int | float):
        return card("Held-out reward", value, "no standard error")
    clear = abs(gain) > 2 * error
    kind = ("good" if gain > 0 else "bad") if clear else "muted"
    verdict = "clear of noise" if clear else "within noise"
    text = f'<span class="{kind}">{gain:+.3f} ± {number(error, 2)}</span>, paired: {verdict}'
    return card("Held-out reward", value, text)


def _ratio_card(title: str, ratio: object, text: str) -> str:
    if not isinstance(ratio, int | float):
        return card(title, "–", "not measured")
    word = "faster" if ratio >= 1 else "slower"
    kind = "good" if ratio >= 1 else "bad"
    factor = ratio if ratio >= 1 else 1 / ratio
    return card(title, f'<span class="{kind}">{factor:.2f}×</span> <small>{word}</small>', text)


def _tokens_card(s: dict[str, Any], certificate: dict[str, Any] | None) -> str:
    """The replay without speculation, or else what `ratoon verify` found."""
    same, tokens, responses = (
        s["tokens_identical"],
        s.get("tokens_compared"),
        s.get("responses_compared"),
    )
    if same is None and certificate is not None:
        good = certificate["verdict"] == "verified"
        value = f'<span class="{"good" if good else "bad"}">{escape(certificate["verdict"])}</span>'
        text = f"{certificate['tokens']:,} tokens of {certificate['responses']:,} responses"
        return card("Tokens, selected again", value, text)
    if same is None:
        return card("Tokens, against plain decoding", "–", "not compared")
    compared = f"{tokens:,} tokens" if isinstance(tokens, int) else "one step"
    compared += f" of {responses:,} responses" if isinstance(responses, int) else ""
    value = '<span class="good">identical</span>' if same else '<span class="bad">differ</span>'
    return card("Tokens, against plain decoding", value, f"{compared} compared")


def _idle_card(s: dict[str, Any]) -> str:
    idle, filled, tokens = s["idle_fraction"], s["idle_fraction_filled"], s["spot_tokens"]
    if not isinstance(idle, int | float):
        return card("Idle in rollouts", "–", "not measured")
    text = "of worker time"
    if isinstance(filled, int | float) and isinstance(tokens, int | float):
        text += f"; {filled:.0%} of it trained the drafter, {number(tokens)} tokens"
    return card("Idle in rollouts", f"{idle:.0%}", text)


def _acceptance_card(s: dict[str, Any]) -> str:
    first, last = s["acceptance_length_first"], s["acceptance_length_last"]
    if not isinstance(first, int | float) or not isinstance(last, int | float):
        return card("Tokens per verification", "–", "not measured")
    value = f"<small>{first:.2f} →</small> {last:.2f}"
    return card("Tokens per verification", value, "first and last step; 1 is plain decoding")
