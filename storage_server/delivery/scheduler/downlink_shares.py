"""How the link into a client's memory, its downlink, is shared among the storage servers that write to it. Pure; the
caller supplies the time, in seconds of a monotonic clock.

Every agent has a keeper among the members of a cluster, as keys have. A server that has bytes for an agent asks the
keeper for a share of the downlink, and asks again all the time while it has some. Shares are as the bytes that the
servers have left, so that all of them end together: a layer is ready when the last of them has written its slices.

Example: a downlink of 1 GB/s; server a has 300 MB left and server b 100 MB. Shares are 750 and 250 MB/s, and both end
after 0.4 s. With equal shares b would end after 0.2 s, and a after 0.6 s at half of the downlink.

A server that asks first says how many bytes the whole has of which it brings a part, and so gets no more than its part
at once. A share that nobody asks for again ends after SHARE_S: a server that is killed leaves the downlink to the
others. One that comes late, with another request, gets its part of what all have left, up to what the others' shares
leave or half of an equal share: until the others have asked again, and got less, all together may use OVER_MAX times
the downlink.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE_S = 0.5
"""How long a share holds that is not asked for again."""
RENEW_S = 0.1
"""How often a server asks that has bytes left."""
LATE_FRACTION = 0.5
"""A server that comes while the others' shares take all gets this fraction of an equal share."""
OVER_MAX = 1.5
LEAST_FRACTION = 0.01
"""A server that comes while even that is taken gets this fraction of an equal share."""


@dataclass(slots=True)
class _Writer:
    left_bytes: int
    whole_bytes: int
    share_bytes_per_s: float
    asked_s: float

    def left_fraction(self, now_s: float) -> float:
        """The fraction that is left now of what it had left when it asked, as it goes on at its share."""
        return max(0.0, 1.0 - self.share_bytes_per_s * (now_s - self.asked_s) / self.left_bytes)


class DownlinkShares:
    """The shares of the downlinks that this server is the keeper of, by agent and writer."""

    def __init__(self) -> None:
        self._writers: dict[str, dict[str, _Writer]] = {}

    def __len__(self) -> int:
        return len(self._writers)

    def share(
        self,
        agent_id: str,
        downlink_bytes_per_s: float,
        writer: str,
        left_bytes: int,
        whole_bytes: int,
        now_s: float,
    ) -> float:
        """The bytes/s that a writer with `left_bytes` for an agent may use of its downlink until `now_s + SHARE_S`.
        These are a part of `whole_bytes` that servers have left for the same requests. One that has nothing left gives
        its share back, and gets 0.
        """
        writers = self._writers.setdefault(agent_id, {})
        for name in [name for name, each in writers.items() if each.asked_s + SHARE_S <= now_s or name == writer]:
            del writers[name]
        if left_bytes <= 0:
            if not writers:
                del self._writers[agent_id]
            return 0.0
        fractions = [(each, each.left_fraction(now_s)) for each in writers.values()]
        known_bytes = left_bytes + sum(each.left_bytes * fraction for each, fraction in fractions)
        all_bytes = max(known_bytes, whole_bytes, *(each.whole_bytes * fraction for each, fraction in fractions))
        taken = sum(each.share_bytes_per_s for each in writers.values())
        fair, equal = downlink_bytes_per_s * left_bytes / all_bytes, downlink_bytes_per_s / (len(writers) + 1)
        late = min(LATE_FRACTION * equal, OVER_MAX * downlink_bytes_per_s - taken)
        share = min(fair, max(downlink_bytes_per_s - taken, late, LEAST_FRACTION * equal))
        writers[writer] = _Writer(left_bytes, whole_bytes, share, now_s)
        return share

    def forget(self, agent_id: str) -> None:
        """Forget an agent that is gone."""
        self._writers.pop(agent_id, None)
