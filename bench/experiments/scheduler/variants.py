"""What is compared: the five policies of the paper, held for an epoch or solved anew at every arrival and end, and
slack-aware dispatch. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage_server.scheduler.policies import MARGIN_BYTES_PER_S, Policy
from storage_server.scheduler.pool import PoolSettings

EPOCH_S_MAX = 600.0
"""Longer than any epoch of these benchmarks: rates are held until all requests have their bytes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """`policy` None is slack-aware dispatch, which is always work-conserving."""

    policy: Policy | None
    is_work_conserving: bool

    @property
    def name(self) -> str:
        """As in results."""
        if self.policy is None:
            return "slack"
        return f"{self.policy.value}/work-conserving" if self.is_work_conserving else self.policy.value

    def pool_settings(
        self, margin_bytes_per_s: float = MARGIN_BYTES_PER_S, gather_s: float = 0.0, epoch_s_max: float = EPOCH_S_MAX
    ) -> PoolSettings:
        """What a pool is made with."""
        return PoolSettings(self.policy, self.is_work_conserving, margin_bytes_per_s, epoch_s_max, gather_s)


HELD = tuple(Variant(policy, is_work_conserving=False) for policy in Policy)
WORK_CONSERVING = tuple(Variant(policy, is_work_conserving=True) for policy in Policy)
SLACK = Variant(None, is_work_conserving=True)
EQUAL = HELD[0]
EQUAL_WORK_CONSERVING = WORK_CONSERVING[0]
CALIBRATED = Variant(Policy.CALIBRATED_STALL_OPT, is_work_conserving=False)
VARIANTS = (*HELD, *WORK_CONSERVING, SLACK)
