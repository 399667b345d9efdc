"""Which weights are in use: the policy that draws, and the newest drafter that guesses.

A drafter of any version gives the same tokens, but versions only rise; a response of another policy
than the one that is trained would be off-policy without saying so.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.errors import StaleVersionError


@dataclass(frozen=True, slots=True)
class Publication:
    """Drafter weights that lie in a slot of the exchange."""

    version: int
    checksum: str
    slot: int


class VersionLedger:
    """The policy that all workers serve, and the newest published drafter, across rollouts."""

    def __init__(self, policy: int = 0, drafter: int = 0) -> None:
        self.policy = policy
        self.drafter = drafter
        self.latest: Publication | None = None

    def record(self, publication: Publication) -> None:
        """Note a publication. Raises: StaleVersionError if it is not newer than the last."""
        if publication.version <= self.drafter:
            raise StaleVersionError(
                f"drafter version {publication.version} was published after {self.drafter}; "
                "versions must rise, so two workers have trained at a time"
            )
        self.latest = publication
        self.drafter = publication.version

    def check_policy(self, version: int) -> None:
        """Raises: StaleVersionError if a response was drawn from another policy than served."""
        if version != self.policy:
            raise StaleVersionError(
                f"a response was drawn from policy version {version}, but {self.policy} is served"
            )
