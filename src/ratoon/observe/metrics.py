"""Every metric, named once, with its unit and meaning. A name that is not here is an error."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """What a number in `metrics.jsonl` is. Example: `Metric("s", "Time of the whole step")`."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("", "Mean reward of the step's training responses"),
    "reward/std": Metric("", "Standard deviation of the reward over the step's responses"),
    "reward/part/*": Metric("", "Mean of one reward of the weighted sum, before its weight"),
    "reward/errors": Metric("responses", "Rewards that raised, hung, or gave NaN or None"),
    "reward/constant_groups_frac": Metric("", "Share of groups whose rewards are all equal"),
    "eval/reward": Metric("", "Mean reward on the held-out prompts, same noise each time"),
    "eval/reward_stderr": Metric("", "Standard error of `eval/reward` over prompts"),
    "eval/tokens_mean": Metric("tokens", "Mean length of held-out responses"),
    "response/tokens_mean": Metric("tokens", "Mean length of the step's responses"),
    "response/tokens_max": Metric("tokens", "Length of the step's longest response"),
    "response/cut_frac": Metric("", "Share of responses that ended at the length limit"),
    "response/count": Metric("responses", "Responses of the step"),
    "sampling/rounds": Metric("rounds", "Rounds of drawing prompts that the step took"),
    "sampling/resampled_groups": Metric(
        "groups", "Groups with equal rewards that the next prompts' replaced"
    ),
    "sampling/constant_groups": Metric(
        "groups", "Groups with equal rewards among those that the step learns from"
    ),
    "advantage/std": Metric("", "Standard deviation of the responses' mean advantages"),
    "advantage/min": Metric("", "Smallest mean advantage of a response"),
    "advantage/max": Metric("", "Largest mean advantage of a response"),
    "advantage/masked_frac": Metric("", "Share of responses that are not learned from"),
    "policy/loss": Metric("", "Policy-gradient loss, with the KL term and the entropy bonus"),
    "policy/kl": Metric("nats/token", "Estimated divergence from the first policy"),
    "policy/entropy": Metric(
        "nats/token",
        "Entropy of the policy over its own responses; exact with an entropy bonus, else estimated",
    ),
    "policy/grad_norm": Metric("", "Gradient norm before clipping"),
    "policy/clip_frac": Metric("", "Share of tokens whose ratio was clipped"),
    "policy/clip_low_frac": Metric("", "Share of tokens whose ratio was clipped from below"),
    "policy/clip_high_frac": Metric("", "Share of tokens whose ratio was clipped from above"),
    "policy/approx_kl": Metric(
        "nats/token", "Estimated divergence of the policy before the update from it now (k3)"
    ),
    "policy/mismatch_weight_mean": Metric(
        "", "Mean weight of tokens by trainer over engine probability; 1 where bits are equal"
    ),
    "policy/mismatch_capped_frac": Metric("", "Share of tokens whose weight was cut at the cap"),
    "policy/ratio_mean": Metric("", "Mean ratio of new to old probability"),
    "policy/tokens": Metric("tokens", "Tokens of the update, prompts included"),
    "policy/tokens_per_s": Metric("tokens/s", "Update speed, all workers together"),
    "policy/engine_logprob_diff_mean": Metric(
        "nats", "Mean difference of engine and trainer log-probabilities"
    ),
    "policy/engine_logprob_equal_frac": Metric(
        "", "Share of tokens whose engine and trainer log-probabilities have equal bits"
    ),
    "policy/ratio_max": Metric("", "Largest ratio of new to old probability"),
    "policy/lr": Metric("", "Learning rate of the step"),
    "policy/engine_logprob_diff_max": Metric(
        "nats", "Largest difference of engine and trainer log-probabilities; 0 = equal bits"
    ),
    "sft/loss": Metric("nats/token", "Mean loss on completions"),
    "sft/eval_loss": Metric("nats/token", "Mean loss on held-out completions"),
    "sft/grad_norm": Metric("", "Gradient norm before clipping"),
    "sft/lr": Metric("", "Learning rate of the step"),
    "sft/tokens": Metric("tokens", "Tokens of the step, prompts included"),
    "sft/tokens_per_s": Metric("tokens/s", "Training speed, all workers together"),
    "pretrain/loss": Metric(
        "nats/token", "Training loss of the subnetwork, mean since the record before"
    ),
    "pretrain/eval_loss": Metric("nats/token", "Held-out loss of the whole model"),
    "pretrain/eval_subnetwork_loss": Metric(
        "nats/token", "Held-out loss of the subnetwork in training"
    ),
    "pretrain/grad_norm": Metric("", "Gradient norm before clipping, mean since the record before"),
    "pretrain/clipped_frac": Metric("", "Share of steps clipped since the record before"),
    "pretrain/lr": Metric("", "Learning rate of the step"),
    "pretrain/stage": Metric("", "Number of the stage, from 0"),
    "pretrain/tokens": Metric("tokens", "Tokens trained on so far"),
    "pretrain/tokens_per_s": Metric("tokens/s", "Training speed, all processes together"),
    "pretrain/processes": Metric("processes", "Processes that train together"),
    "pretrain/train_s": Metric("s", "Time of training steps so far, evaluation left out"),
    "pretrain/flops": Metric(
        "FLOP", "Counted operations so far: forward, backward and optimizer, head included"
    ),
    "pretrain/saved_frac": Metric(
        "", "Share of operations saved so far against the whole model on the same tokens"
    ),
    "pretrain/saved_frac_paper": Metric(
        "", "The same as the paper counts it: layers only, in proportion to their size"
    ),
    "pretrain/probe_flops": Metric(
        "FLOP", "Counted operations so far of deciding when to grow, part of the operations"
    ),
    "pretrain/probe_s": Metric("s", "Time so far of deciding when to grow, part of the time"),
    "switch/stage": Metric("", "Number of the stage that begins after these steps, from 0"),
    "switch/layers": Metric("", "Share of layers that takes part from here on"),
    "switch/heads": Metric("", "Share of heads that takes part from here on"),
    "switch/neurons": Metric("", "Share of neurons that takes part from here on"),
    "switch/full_loss_before": Metric(
        "nats/token", "Held-out loss of the whole model before a stage begins"
    ),
    "switch/full_loss_after": Metric(
        "nats/token", "Held-out loss of the whole model after it has grown"
    ),
    "switch/subnetwork_loss_before": Metric(
        "nats/token", "Held-out loss of the last stage's subnetworks before a stage begins"
    ),
    "switch/subnetwork_loss_after": Metric(
        "nats/token", "Held-out loss of the new stage's subnetworks at its beginning"
    ),
    "switch/drop": Metric("nats/token", "Sudden drop of the subnetwork's loss at the switch"),
    "switch/predicted_drop": Metric(
        "nats/token", "That drop by the second-order expansion in the units' outputs"
    ),
    "rollout/tokens": Metric("tokens", "Response tokens generated in the step"),
    "rollout/tokens_per_s": Metric("tokens/s", "Generation speed, all workers together"),
    "rollout/decode_steps": Metric("steps", "Forward passes of the policy while decoding"),
    "planner/length_error": Metric(
        "", "Mean error of predicted response lengths, as a share of the mean length"
    ),
    "planner/least_s": Metric(
        "s", "Rollout time that no order could beat, with these lengths at the measured speeds"
    ),
    "planner/over_least": Metric("", "Rollout time over that; 1 is the best possible"),
    "speculation/acceptance_length": Metric(
        "tokens", "Tokens per sequence and verification, the extra token included"
    ),
    "speculation/share": Metric("", "Share of decode steps that guessed ahead"),
    "speculation/drafted": Metric("tokens", "Draft tokens verified"),
    "speculation/accepted": Metric("tokens", "Draft tokens that matched"),
    "speculation/saved_s": Metric(
        "s", "Time that guessing saved, all workers together, by the tuner's measured costs"
    ),
    "drafter/loss": Metric("", "Loss of the drafter in this step's spot training"),
    "drafter/tokens": Metric("tokens", "Tokens the drafter was trained on in this step"),
    "drafter/optimizer_steps": Metric("steps", "Drafter optimizer steps in this step"),
    "drafter/versions": Metric("versions", "Drafter versions sent to decoding workers"),
    "time/step_s": Metric("s", "Time of the whole step"),
    "time/rollout_s": Metric("s", "Time of generating, all rounds of drawing together"),
    "time/reward_s": Metric("s", "Time spent waiting for rewards after a round's last token"),
    "time/update_s": Metric("s", "Time of the policy update"),
    "time/weights_s": Metric("s", "Time to hand new weights to the engines"),
    "time/evaluation_s": Metric("s", "Time of the held-out evaluation"),
    "time/spot_stop_ms": Metric("ms", "From the last response to the end of spot training"),
    "idle/frac": Metric("", "Share of worker time in the rollout with nothing to decode"),
    "idle/filled_frac": Metric("", "Share of that time spent training the drafter"),
}


def metric(name: str) -> Metric:
    """Look a metric up.

    Raises:
        ValueError: the name is not registered.
    """
    found = METRICS.get(name) or METRICS.get(f"{name.rpartition('/')[0]}/*")
    if found is None:
        near = difflib.get_close_matches(name, METRICS, n=3)
        raise ValueError(f"metric `{name}` is not registered; near: {', '.join(near) or 'none'}")
    return found
