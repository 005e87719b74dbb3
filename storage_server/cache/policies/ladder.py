"""The forms through which a chunk goes before it leaves a cache, and the price at which each step is taken. Pure.

A use of a chunk that is there saves what it would take without it: computing it where it is stored, loading it from its
home where it is in memory. It is read instead, and decoded. A use of an encoded one loses quality, which `alpha_s`
weighs. So a step has a price: what it costs a use, for each byte that it frees, over what eviction of the exact chunk
costs. The chunk whose price times its expected uses is least takes its next step
(storage_server.cache.policies.policy). Source: AdaptCache (002), "policy optimizer": marginal drop = (U before - U
after) / bytes freed; here the prices of one chunk are made once, and uses are those of the order.

    alpha 0.5 s, a chunk of 32 MB that takes 32 ms to compute, and 8 ms to read
    exact to kivi8-1     costs  7 ms, frees 14 MB     price 0.67     before exact chunks of as many uses leave
    kivi8-1 to k8v4-1    costs  9 ms, frees  4 MB     price 3.0      not taken: it costs more than leaving
    kivi8-1 leaves       costs 19 ms, frees 18 MB     price 1.4      after exact chunks of as many uses have left

`Ladders` makes those of stored chunks. The owner of a bucket that replaces chunks has said that an encoded chunk is
better than none, so the price of the first step is at most that of leaving, and a further one is taken only where it
costs less. None of the codecs drops tokens: nobody could get those back, and few readers can do without.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from descriptors.kv_forms import KvLayout
from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import Codec, LayerShape, goes_on, takes
from storage_server.cache.policies.use_worth import STEPS_PER_OCTAVE
from storage_server.cache.policies.utility import Form, UtilitySettings, use_cost_s
from storage_server.planning.extent import ALIGNMENT_BYTES, aligned
from storage_server.planning.forms import LossView, shape_of

COMPUTED_BYTES_PER_S = 1e9
"""At which KV is computed, where no profile says it of the model: about that of 8 B parameters on one H100."""
SAVED_FRACTION_MIN = 0.1
"""A use saves at least this part of computing, also where the disk is said to be no faster."""
PRICE_MIN = 2.0**-16
"""A step that costs nothing has this price, so that among chunks those with the fewest uses still go first."""
LADDERS_MAX = 4096


class Rung(NamedTuple):
    """A form of a chunk, the room that it takes, and the price of its next step, in steps of `use_worth`: to the next
    rung, or out of the cache.
    """

    codec: Codec
    nbytes: int
    step: int


Ladder = tuple[Rung, ...]
"""The present form first."""


class ChunkForm(NamedTuple):
    """The form of a stored chunk: the layout of the exact one, the codecs that it has passed, and the class of its
    content.
    """

    layout: KvLayout
    chain: Chain = ()
    content_class: str = ""


class FormCost(NamedTuple):
    """A form of a chunk: the room that it takes, the seconds that a use of it costs more than one of the exact chunk,
    and those that a use saves because the chunk is there.
    """

    codec: Codec
    nbytes: int
    cost_s: float
    saved_s: float


_NO_STEP: tuple[float, FormCost | None] = (math.inf, None)


def ladder_from(
    present: FormCost,
    unit: float,
    able: Callable[[FormCost, Chain], Sequence[FormCost]],
    change_s: Callable[[FormCost, FormCost], float] = lambda before, after: 0.0,
    *,
    first_is_bounded: bool = False,
) -> Ladder:
    """The ladder of a chunk from its present form on. `unit` is what a use of the exact chunk saves, for each byte.
    `able` has the smaller forms that it may go on to, behind the codecs that it passes here. A change that has to be
    loaded costs `change_s`, as if for one use; so the chunk goes at once to a form from which it will not have to go on
    so for less. With `first_is_bounded` the price of encoding an exact chunk is at most that of leaving.
    """
    at, rungs = present, list[Rung]()
    passed: Chain = ()
    while True:
        leaving = at.saved_s / at.nbytes / unit
        price, after = _cheapest(at, able(at, passed), unit, change_s)
        is_bounded = first_is_bounded and at.codec is Codec.EXACT
        if after is None or (price > leaving and not is_bounded):
            return (*rungs, Rung(at.codec, at.nbytes, _step_of(leaving)))
        rungs.append(Rung(at.codec, at.nbytes, _step_of(min(leaving, price))))
        at, passed = after, (*passed, after.codec)


def _cheapest(
    at: FormCost, able: Sequence[FormCost], unit: float, change_s: Callable[[FormCost, FormCost], float]
) -> tuple[float, FormCost | None]:
    prices = [(each.cost_s - at.cost_s + change_s(at, each)) / (at.nbytes - each.nbytes) / unit for each in able]
    price, after = min(zip(prices, able, strict=True), key=lambda pair: (pair[0], pair[1].nbytes), default=_NO_STEP)
    if after is not None:
        for later in sorted(able, key=lambda each: -each.nbytes):
            if later.nbytes < after.nbytes and later.cost_s - after.cost_s < change_s(after, later):
                after = later
    return price, after


class Ladders:
    """Makes the ladders of one bucket's chunks; `computed_bytes_per_s` are rates by layers and bytes of a token in one
    layer. The last LADDERS_MAX are remembered: chunks of one model have the same.
    """

    def __init__(
        self, settings: UtilitySettings, computed_bytes_per_s: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        self._settings = settings
        self._computed_bytes_per_s = computed_bytes_per_s or {}
        self._known: OrderedDict[Hashable, Ladder] = OrderedDict()

    def of(self, form: ChunkForm, losses: LossView | None = None, refused: Collection[Codec] = ()) -> Ladder:
        """The ladder of a chunk, within the bound of the losses, without the codecs that it was refused."""
        name = form, losses, tuple(refused)
        ladder = self._known.get(name)
        if ladder is None:
            ladder = self._known[name] = self._made(form, losses, refused)
            if len(self._known) > LADDERS_MAX:
                self._known.popitem(last=False)
        return ladder

    def _made(self, form: ChunkForm, losses: LossView | None, refused: Collection[Codec]) -> Ladder:
        shape, num_layers = shape_of(form.layout), form.layout.num_layers
        present = form.chain[-1] if form.chain else Codec.EXACT
        costs = self._costs(form, present)

        def able(at: FormCost, passed: Chain) -> list[FormCost]:
            bears = _bearing(losses, shape, num_layers, (*form.chain, *passed))
            return [
                each
                for each in costs
                if each.nbytes < at.nbytes and each.codec not in refused and goes_on(at.codec, each.codec)
                and takes(each.codec, shape.tokens) and bears(each.codec)
            ]  # fmt: skip

        at = next(each for each in costs if each.codec is present)
        return ladder_from(at, costs[0].saved_s / costs[0].nbytes, able, first_is_bounded=True)

    def _computed_rate(self, layout: KvLayout) -> float:
        token_layer_bytes = layout.nbytes // (layout.num_layers * layout.tokens)
        return self._computed_bytes_per_s.get((layout.num_layers, token_layer_bytes), COMPUTED_BYTES_PER_S)

    def _costs(self, form: ChunkForm, present: Codec) -> list[FormCost]:
        """The costs of the exact chunk, and of all forms that are smaller. Of an encoded one that was made by a codec
        without figures nothing is known, so it costs a use nothing.
        """
        settings, layout, shape = self._settings, form.layout, shape_of(form.layout)
        qualities = settings.class_qualities.get(form.content_class, {})
        rate = settings.home_bytes_per_s
        computed_s, exact_s = layout.nbytes / self._computed_rate(layout), layout.nbytes / rate

        def cost_of(codec: Codec, nbytes: int, cost_s: float, loaded_s: float) -> FormCost:
            saved_s = max(computed_s - loaded_s, SAVED_FRACTION_MIN * computed_s)
            return FormCost(codec, max(ALIGNMENT_BYTES, aligned(nbytes)), cost_s, saved_s)

        found = [cost_of(Codec.EXACT, layout.nbytes, 0.0, exact_s)]
        for codec in dict.fromkeys((*settings.codecs, present)):
            nbytes = layout.nbytes if codec is Codec.EXACT else layout.num_layers * encoded_bytes_max(codec, shape)
            if codec is Codec.EXACT or (codec is not present and (codec.drops_tokens or nbytes >= layout.nbytes)):
                continue
            figures = settings.codecs.get(codec)
            if figures is None:
                found.append(cost_of(codec, nbytes, 0.0, nbytes / rate))
                continue
            decode_s = layout.nbytes / figures.decoded_bytes_per_s
            encoded = Form(codec.value, nbytes, qualities.get(codec, figures.quality), decode_s)
            cost_s = use_cost_s(encoded, rate, settings.alpha_s) - exact_s
            found.append(cost_of(codec, nbytes, cost_s, nbytes / rate + decode_s))
        return found


def _bearing(losses: LossView | None, shape: LayerShape, num_layers: int, chain: Chain) -> Callable[[Codec], bool]:
    """Whether a chunk that has passed this chain may go on to a codec."""
    if losses is None or (bound := losses.max_loss) is None:
        return lambda _: True
    table, model = losses.table, losses.model
    return lambda codec: table.told(model, shape, num_layers, (*chain, codec)).kl <= bound


def _step_of(price: float) -> int:
    return round(STEPS_PER_OCTAVE * math.log2(max(PRICE_MIN, price)))
