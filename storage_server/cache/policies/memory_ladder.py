"""The forms through which a chunk in memory goes, and what it costs to have it in one of them. Pure.

Of the codecs that its readers take it is encoded with one, that whose chunks save most for each byte of memory. Several
in turn gained nothing over that one, on requests that were answered live or replayed (docs/design/compression.md).

    alpha 0.25 s, a chunk of 64 MB at 1 GB/s from home; a use of it saves 64 ms less what it costs in its form
    exact          0.9 ms saved for each MB of memory
    kivi8-1        1.1 ms      less than half as much again: not worth a codec
    kivi4-1        1.7 ms      this one

Its home has the chunk exactly. So a use of one that has left costs loading it, and a chunk comes back to a better form
by a load, too. It does so once its uses have cost as much more in the present form as RISE_LOADS loads: whoever rents
until the rent has come to the price, and then buys, needs no guess of how often a chunk will be used (Karlin et al.
1988, "Competitive snoopy caching"). It is more than one load, because most chunks are used a few times only, and the
chunk that makes room is worth something, too.

    alpha 0.25 s, a chunk of 64 MB at 1 GB/s from home, 4 bits of quality 0.96 that decode in 16 ms
    a use at 4 bits costs 20 ms more than an exact one, a load 64 ms   ->  it comes back exactly at the 13th use
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.layer import Codec, goes_on
from storage_server.cache.policies.ladder import LADDERS_MAX, SAVED_FRACTION_MIN, FormCost, Ladder, ladder_from
from storage_server.cache.policies.use_worth import STEPS_PER_OCTAVE
from storage_server.cache.policies.utility import Form, UtilitySettings, use_cost_s

RISE_LOADS = 4.0
SAVED_OVER_EXACT_MIN = 1.5
"""A codec has to save so many times as much for each byte as the exact chunk does. The policy only estimates how often
chunks will be used: with codecs that save less, replayed requests cost up to 4 % more than without codecs.
"""


class MemoryLadders:
    """Makes the ladders of chunks in memory out of the forms that their readers take, and remembers the last ones."""

    def __init__(self, settings: UtilitySettings) -> None:
        self._settings = settings
        self._order: tuple[str, ...] | None = None
        self.epoch = 0
        """Another one after each `prefer` that changed what is offered."""
        self._known: OrderedDict[tuple[tuple[Form, ...], str], Ladder] = OrderedDict()
        self._offered: OrderedDict[tuple[tuple[Form, ...], str | None], tuple[Form, ...]] = OrderedDict()

    @property
    def order(self) -> tuple[str, ...] | None:
        """The codecs that are offered, the best first; None where they go by what a byte saves."""
        return self._order

    def prefer(self, order: tuple[str, ...]) -> None:
        """Offer these codecs only, the first one that a chunk's readers take; where there are none, exact chunks."""
        if order != self._order:
            self._order = order
            self.epoch += 1
            self._offered.clear()

    def load_s(self, forms: Sequence[Form]) -> float:
        """The seconds that the exact chunk takes from its home. `forms` has the exact one first."""
        return forms[0].nbytes / self._settings.home_bytes_per_s

    def rise_cost_s(self, forms: Sequence[Form]) -> float:
        """As much as uses in another form than the best one have to cost more, before the chunk comes back to that."""
        return RISE_LOADS * self.load_s(forms)

    def use_cost_s(self, form: Form, forms: Sequence[Form]) -> float:
        """The seconds that a use costs in one of these forms, the lost quality among them."""
        settings = self._settings
        return use_cost_s(form, settings.memory_bytes_per_s, settings.alpha_s, self.load_s(forms))

    def offered(self, forms: tuple[Form, ...], present: str | None = None) -> tuple[Form, ...]:
        """Leave the exact form, an encoded one, and the present one: the first in the order, or without one that whose
        chunks save most for each byte. The same forms get the same object until `prefer`.
        """
        name = forms, present
        offered = self._offered.get(name)
        if offered is None:
            offered = self._offered[name] = self._chosen(forms, present)
            if len(self._offered) > LADDERS_MAX:
                self._offered.popitem(last=False)
        return offered

    def _chosen(self, forms: tuple[Form, ...], present: str | None) -> tuple[Form, ...]:
        load_s = self.load_s(forms)

        def saved(form: Form) -> float:
            return (load_s - self.use_cost_s(form, forms)) / form.nbytes

        exact, *encoded = forms
        least = SAVED_OVER_EXACT_MIN * max(0.0, saved(exact))
        able = [form for form in encoded if saved(form) > least]
        if (order := self._order) is None:
            chosen = max(able, key=saved, default=exact)
        else:
            chosen = min(
                (form for form in able if form.codec in order), key=lambda f: order.index(f.codec), default=exact
            )
        codecs = {exact.codec, present, chosen.codec}
        return tuple(form for form in forms if form.codec in codecs)

    def best(self, forms: Sequence[Form]) -> Form:
        """The form in which a use costs least, whatever room it takes; of equal ones the smallest."""
        return min(reversed(forms), key=lambda form: self.use_cost_s(form, forms))

    def of(self, forms: tuple[Form, ...], present: Form) -> Ladder:
        """The ladder of a chunk with these forms, from the present one on."""
        name = forms, present.codec
        ladder = self._known.get(name)
        if ladder is None:
            ladder = self._known[name] = self._made(forms, present)
            if len(self._known) > LADDERS_MAX:
                self._known.popitem(last=False)
        return ladder

    def rising(self, forms: tuple[Form, ...], best: Form) -> Ladder:
        """The ladder of a chunk that is to come back to its best form, at half of the price for the first step: it
        comes where what has to make room for it is worth clearly less, and not in turn with its like.
        """
        first, *others = self.of(forms, best)
        return (first._replace(step=first.step - STEPS_PER_OCTAVE), *others)

    def _made(self, forms: tuple[Form, ...], present: Form) -> Ladder:
        load_s = self.load_s(forms)
        exact_s = self.use_cost_s(forms[0], forms)
        costs: list[FormCost] = []
        for form in forms:
            cost_s = self.use_cost_s(form, forms)
            costs.append(FormCost(Codec(form.codec), form.nbytes, cost_s - exact_s, load_s - cost_s))

        def able(at: FormCost, passed: Chain) -> list[FormCost]:
            return [each for each in costs if each.nbytes < at.nbytes]

        def change_s(before: FormCost, after: FormCost) -> float:
            return 0.0 if goes_on(before.codec, after.codec) else load_s

        unit = max(load_s - exact_s, SAVED_FRACTION_MIN * load_s) / forms[0].nbytes
        at = next(each for each in costs if each.codec.value == present.codec)
        return ladder_from(at, unit, able, change_s)
