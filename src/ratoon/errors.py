"""The exception tree of Ratoon.

Every error that a user can cause derives from `RatoonError`; its message says what happened, the
value found, what is allowed and what to do. The command line prints the message alone and exits
with the class's `exit_code`. All classes survive pickling, because they cross process borders.
"""

from __future__ import annotations


class RatoonError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class ConfigError(RatoonError, ValueError):
    """A setting is unknown, has the wrong type, is out of range or has no effect."""

    exit_code = 2


class DataError(RatoonError, ValueError):
    """A data file is missing, empty, malformed, or lacks a mapped column."""

    exit_code = 2


class CapabilityError(RatoonError):
    """The model, machine or installed packages cannot do what was asked."""

    exit_code = 2


class CheckpointError(RatoonError):
    """A checkpoint or model directory is missing, incomplete or damaged."""

    exit_code = 2


class RewardError(RatoonError, RuntimeError):
    """A reward function raised, hung, or returned something that is not a finite number."""


class StaleVersionError(RatoonError, RuntimeError):
    """Weights of another version, or with another checksum, than announced."""


class WorkerLostError(RatoonError, RuntimeError):
    """A worker process failed."""


class WorkerDiedError(WorkerLostError):
    """A worker process ended without a word, or gave no sign of life and was ended."""


class NumericsError(RatoonError, RuntimeError):
    """Logits are NaN, or all tokens of a row are excluded."""


class LosslessViolation(RatoonError, AssertionError):
    """A speculative run produced another token than plain decoding."""
