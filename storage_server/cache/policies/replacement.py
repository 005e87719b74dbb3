"""In which codec a stored chunk is replaced: the one whose loss of utility is least for the bytes that it frees. Pure.
None of them drops tokens: nobody could get those back, and few readers can do without.

alpha 1 s, a chunk of 8 MB on a disk of 1 GB/s:
kivi8-1   quality 1.00, frees 3.5 MB   ->  -0.002 s, -0.0006 s for each MB
kivi4-1   quality 0.99, frees 5.5 MB   ->   0.005 s,  0.0008 s for each MB     kivi8-1 goes first
"""

from __future__ import annotations

from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies.utility import Form, TieredEntry, TierModel, TierPlacement, utility
from storage_server.cache.policies.utility_policy import UtilitySettings


def replacements(
    shape: LayerShape, num_layers: int, content_class: str, settings: UtilitySettings
) -> tuple[Codec, ...]:
    """The codecs in this order, for a chunk of so many layers whose content has this class, empty for none."""
    qualities = settings.class_qualities.get(content_class, {})
    exact_bytes = num_layers * shape.nbytes
    home = (TierModel("home", exact_bytes, settings.home_bytes_per_s),)
    losses: dict[Codec, float] = {}
    for codec, figures in settings.codecs.items():
        nbytes = num_layers * encoded_bytes_max(codec, shape)
        if codec.drops_tokens or nbytes >= exact_bytes:
            continue
        form = Form(
            codec.value, nbytes, qualities.get(codec, figures.quality), exact_bytes / figures.decoded_bytes_per_s
        )
        entry = TieredEntry(codec, 1.0, (Form(Codec.EXACT.value, exact_bytes), form), 0.0)
        exact, encoded = (utility(entry, TierPlacement(0, at), home, settings.alpha_s) for at in (0, 1))
        losses[codec] = (exact - encoded) / (exact_bytes - nbytes)
    return tuple(sorted(losses, key=lambda codec: losses[codec]))
