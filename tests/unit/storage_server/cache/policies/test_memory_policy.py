"""The policy of the tier that compresses: what it keeps, in which form, and that its books stay right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.kv_codecs.chains import parse_chain
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import Codec, LayerShape, goes_on
from storage_server.cache.policies import reader_forms
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.memory_ladder import MemoryLadders
from storage_server.cache.policies.memory_policy import MemoryPolicy
from storage_server.cache.policies.reader_forms import CHUNK_ERRORS_MAX, ChunkUse, ReaderForms
from storage_server.cache.policies.utility import CodecFigures, Form, UtilitySettings
from storage_server.planning.forms import Encoded, LossView, Reading
from storage_server.planning.losses import ChunksModel, LossTable, MeasuredLoss, ModelLosses

SHAPE = LayerShape(16, 128, Element.BFLOAT16)
READING = Reading(SHAPE, 4, (Codec.KIVI8, Codec.KIVI4, Codec.KIVI2))
EXACT = READING.exact_bytes
FIGURES = {
    Codec.KIVI8: CodecFigures(1.0, 3e9), Codec.KIVI4: CodecFigures(0.99, 4e9), Codec.KIVI2: CodecFigures(0.5, 3e9),
}  # fmt: skip
SETTINGS = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)
Key = tuple[str, int]


def keys(*numbers: int) -> list[Key]:
    return [("file", number) for number in numbers]


class Books:
    """The forms of chunks in memory as the decisions make them."""

    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.now_s = 0.0
        self.held: dict[Key, Codec | None] = {}
        self.readings: dict[Key, Reading] = {}
        self.change_count = 0

    def use(
        self, wanted: list[Key], reading: Reading | None = READING, step_s: float = 1.0, content_class: str = ""
    ) -> None:
        self.now_s += step_s
        decision = self.policy.request(self.now_s, [ChunkUse(key, EXACT, content_class) for key in wanted], reading)
        self.change_count += len(decision.evicted) + len(decision.recoded) + len(decision.admitted)
        for key in decision.evicted:
            del self.held[key]
        made = {**decision.recoded, **decision.admitted}
        self.readings |= {key: encoding.reading for key, encoding in made.items() if encoding is not None}
        for key, further in decision.recoded.items():
            assert goes_on(self.held[key] or Codec.EXACT, further.codec), "made from what is there"
            assert further.codec in further.reading.codecs
            self.held[key] = further.codec
        for key, encoding in decision.admitted.items():
            assert key not in self.held
            assert encoding is None or encoding.codec in encoding.reading.codecs
            self.held[key] = None if encoding is None else encoding.codec

    @property
    def nbytes(self) -> int:
        return sum(
            EXACT if codec is None else self.readings[key].chunk_bytes(codec) for key, codec in self.held.items()
        )


def test_chunks_are_encoded_where_not_all_fit_exactly() -> None:
    """Nothing is evicted that fits at 4 bits, and 2 bits cost too much quality here."""
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    for _ in range(3):
        books.use(keys(*range(8)))
    assert set(books.held) == set(keys(*range(8)))
    assert set(books.held.values()) <= {None, Codec.KIVI8, Codec.KIVI4}
    assert Codec.KIVI4 in books.held.values() or Codec.KIVI8 in books.held.values()


def test_of_the_codecs_that_readers_take_one_is_used() -> None:
    """It is the one whose chunks save most for each byte, whatever the others would save of it."""
    qualities = {Codec.KIVI8: 0.9999, Codec.KIVI4: 0.995, Codec.KIVI2: 0.8}
    figures = {codec: CodecFigures(quality, 1e12) for codec, quality in qualities.items()}
    books = Books(MemoryPolicy(8 * EXACT, replace(SETTINGS, codecs=figures, alpha_s=0.01)))
    seen = set()
    for count in range(2, 40):
        books.use(keys(*range(count)), replace(READING, codecs=tuple(figures)))
        seen |= set(books.held.values())
    assert seen == {None, Codec.KIVI4}


def test_a_codec_that_saves_little_more_than_the_exact_chunk_is_not_used() -> None:
    """At 8 bits a chunk of 0.56 of the bytes saves a use 0.25 ms of the 0.33 ms that loading it takes."""
    for quality, expected in ((0.92, {None}), (0.98, {None, Codec.KIVI8})):
        figures = {Codec.KIVI8: CodecFigures(quality, 1e12)}
        books = Books(MemoryPolicy(4 * EXACT, replace(SETTINGS, codecs=figures)))
        for _ in range(20):
            books.use(keys(*range(6)), replace(READING, codecs=tuple(figures)))
        assert set(books.held.values()) == expected


@pytest.mark.parametrize("alpha_s", [0.25, 1.0])
def test_of_the_default_codecs_the_live_bench_has_four_bits(alpha_s: float) -> None:
    """As docs/design/compression.md says: contexts of 512 tokens of SmolLM2, and the qualities that it had there."""
    nbytes, home_bytes_per_s = 512 * 30 * 768, 512 * 30 * 768 / 0.15
    parts = {Codec.KIVI8: (0.5625, 0.9947), Codec.K8V4: (0.4375, 0.9802), Codec.KIVI4: (0.3125, 0.9683)}
    forms = [Form("exact", nbytes)]
    forms += [Form(codec.value, int(part * nbytes), quality, nbytes / 4e9) for codec, (part, quality) in parts.items()]
    settings = UtilitySettings(alpha_s=alpha_s, memory_bytes_per_s=1e9, home_bytes_per_s=home_bytes_per_s)
    offered = MemoryLadders(settings).offered(tuple(forms))
    assert [form.codec for form in offered] == ["exact", "kivi4-1"]


def test_chunks_are_encoded_further_where_they_lie_once_their_readers_take_it() -> None:
    """Nothing leaves to come again in a smaller form."""
    figures = {Codec.KIVI8: CodecFigures(0.9999, 1e12), Codec.KIVI4: CodecFigures(0.995, 1e12)}
    books = Books(MemoryPolicy(8 * EXACT, replace(SETTINGS, codecs=figures, alpha_s=0.01)))
    seen = set()
    for at in range(60):
        before = dict(books.held)
        books.use(keys(*range(14)), replace(READING, codecs=tuple(figures) if at > 5 else (Codec.KIVI8,)))
        seen |= {(before[key], books.held[key]) for key in before.keys() & books.held.keys()}
    assert (Codec.KIVI8, Codec.KIVI4) in seen
    assert not any(was is not None and now is None for was, now in seen)


@pytest.mark.parametrize("tokens", [4, 16])
def test_what_would_not_fit_where_it_lies_goes_and_comes_again(tokens: int) -> None:
    """With few tokens 4 bits and their scales take more than 8 bits without."""
    shape = LayerShape(tokens, 1024, Element.FLOAT16)
    first, second = (Reading(shape, 16, (codec,)) for codec in (Codec.FP8, Codec.KIVI4))
    figures = {codec: CodecFigures(0.99, 1e12) for codec in (Codec.FP8, Codec.KIVI4)}
    is_larger = second.chunk_bytes(Codec.KIVI4) > first.chunk_bytes(Codec.FP8)
    assert is_larger == (tokens < 16)
    policy = MemoryPolicy(4 * first.exact_bytes, replace(SETTINGS, codecs=figures, alpha_s=1e-4))
    held: dict[Key, Codec | None] = {}
    seen: set[Codec | None] = set()
    for now_s, reading in enumerate([first] * 4 + [second] * 80):  # so many that the first reader is forgotten
        decision = policy.request(now_s, [ChunkUse(key, first.exact_bytes) for key in keys(*range(7))], reading)
        for key in decision.recoded:
            assert held[key] is None or not is_larger
        forms = {**decision.recoded, **decision.admitted}
        held |= {key: None if encoding is None else encoding.codec for key, encoding in forms.items()}
        gone = set(decision.evicted) - set(decision.admitted)
        held = {key: codec for key, codec in held.items() if key not in gone}
        seen |= set(held.values())
    assert seen >= {Codec.FP8, Codec.KIVI4}
    assert Codec.FP8 not in held.values()


def test_content_that_a_codec_damages_is_evicted_rather_than_encoded() -> None:
    """Class by class: a class without figures of its own has those of all content."""
    settings = replace(SETTINGS, class_qualities={"code": dict.fromkeys(FIGURES, 0.2)})
    books = Books(MemoryPolicy(4 * EXACT, settings))
    for _ in range(6):
        books.use(keys(*range(8)), content_class="code")
        books.use(keys(*range(8, 16)), content_class="chat")
    assert not any(books.held.get(key) for key in keys(*range(8)))
    assert sum(codec is not None for codec in books.held.values()) >= 8


def test_what_is_used_more_often_stays_in_the_better_form() -> None:
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    for number in range(60):
        books.use(keys(0, 1))
        books.use(keys(2 + number % 9))
    sizes = {key: EXACT if codec is None else READING.chunk_bytes(codec) for key, codec in books.held.items()}
    assert min(sizes[key] for key in keys(0, 1)) >= max(size for key, size in sizes.items() if key not in keys(0, 1))


def test_readers_that_take_exact_chunks_only_get_no_other_form() -> None:
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    for _ in range(3):
        books.use(keys(*range(8)), None)
    assert set(books.held.values()) == {None}
    assert len(books.held) == 4


def test_a_chunk_comes_back_exact_when_a_reader_needs_it_so() -> None:
    books = Books(MemoryPolicy(2 * EXACT, SETTINGS))
    for _ in range(3):
        books.use(keys(0, 1, 2))
    encoded = next(key for key, codec in books.held.items() if codec is not None)
    for _ in range(16):
        books.use([encoded], None)
    assert books.held[encoded] is None


def test_readers_of_two_kinds_in_turn_do_not_change_the_form_at_each_turn() -> None:
    """Some take 4 bits, and others exact chunks only: each chunk gets the form that serves both best, and keeps it."""
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    seen: list[dict[Key, Codec | None]] = []
    for turn in range(60):
        books.use(keys(*range(8)), READING if turn % 2 else None)
        seen.append(dict(books.held))
    changes = sum(before.get(key, 0) != after.get(key, 0) for before, after in pairwise(seen[20:]) for key in after)
    assert len(seen[-1]) >= 4
    assert changes <= 4


def test_what_few_readers_take_is_not_kept_for_them() -> None:
    """One use in ten takes encoded chunks: memory is better spent on exact ones. In nine of ten it is not."""
    for is_taken, fewest in ((lambda turn: turn % 10 == 0, 0), (lambda turn: turn % 10 > 0, 6)):
        books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
        for turn in range(80):
            books.use(keys(*range(8)), READING if is_taken(turn) else None)
        encoded = [codec for codec in books.held.values() if codec is not None]
        assert (len(encoded) >= fewest) if fewest else not encoded, encoded


def test_two_bounds_in_turn_keep_a_form_that_both_take() -> None:
    """The stricter reader's codecs are those that both take, so nothing is loaded again for either."""
    policy = MemoryPolicy(4 * EXACT, SETTINGS)
    for codec, error in ((Codec.KIVI8, 0.01), (Codec.KIVI4, 0.1)):
        policy.readers.note_error(READING, codec, error)
    books = Books(policy)
    strict = replace(READING, max_error=0.05)
    for turn in range(40):
        books.use(keys(*range(6)), strict if turn % 2 else READING)
    assert set(books.held.values()) <= {None, Codec.KIVI8}
    assert len(books.held) == 6


def test_the_errors_of_one_bucket_say_nothing_of_another() -> None:
    policy = MemoryPolicy(4 * EXACT, SETTINGS)
    mine, theirs = (replace(READING, max_error=0.1, bucket=bucket) for bucket in ("mine", "odd"))
    for codec in READING.codecs:
        policy.readers.note_error(theirs, codec, 0.9)
    books = Books(policy)
    for _ in range(3):
        books.use(keys(*range(8)), mine)
        books.use([("odd", number) for number in range(8)], theirs)
    assert not any(codec for key, codec in books.held.items() if key[0] == "odd")
    assert any(codec for key, codec in books.held.items() if key[0] == "file")


def made(books: Books, key: Key, worst_error: float, reading: Reading = READING) -> None:
    """The tier has encoded a chunk as it was told, with this error."""
    codec = books.held[key]
    assert codec is not None
    books.policy.note_made(key, Encoded(codec, reading.shape, reading.num_layers, worst_error, worst_error))


def test_a_chunk_that_erred_too_much_is_not_encoded_so_for_that_reader_again() -> None:
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    strict = replace(READING, codecs=(Codec.KIVI4,), max_error=0.1)
    for _ in range(3):
        books.use(keys(*range(8)), strict)
    erring = [key for key, codec in books.held.items() if codec is not None]
    for key in erring:
        made(books, key, 0.2)
    for _ in range(3):
        books.use(keys(*range(8)), strict)
    assert erring
    assert not any(books.held.get(key) for key in erring)


def test_a_bound_that_a_chunk_breaks_counts_whoever_had_it_encoded() -> None:
    """One reader without a bound has chunks encoded; one with a bound, which the average keeps, then reads them."""
    policy = MemoryPolicy(4 * EXACT, SETTINGS)
    books = Books(policy)
    anyone, strict = replace(READING, codecs=(Codec.KIVI4,)), replace(READING, codecs=(Codec.KIVI4,), max_error=0.12)
    for _ in range(3):
        books.use(keys(*range(8)), anyone)
    erring = [key for key, codec in books.held.items() if codec is not None]
    for key in erring:
        policy.readers.note_error(anyone, Codec.KIVI4, 0.08)
        made(books, key, 0.15)
    for _ in range(40):
        books.use(keys(*range(8)), strict)
    assert erring
    assert not any(books.held.get(key) for key in erring)


def losing(max_loss: float, forms: dict[str, float]) -> Reading:
    """A reader of 4 and 8 bits with a bound, whose model was measured to lose so much in these forms."""
    measured = {parse_chain(name): MeasuredLoss(0.0, kl, 0.0, 0.0) for name, kl in forms.items()}
    model = ModelLosses("m", 4, SHAPE.width, SHAPE.element, 64, measured, texts="", text_count=2, release="1")
    return replace(
        READING, codecs=(Codec.KIVI8, Codec.KIVI4), losses=LossView(LossTable((model,)), ChunksModel("m"), max_loss)
    )


def test_codecs_that_lose_more_than_a_reader_takes_are_not_made_for_it() -> None:
    for max_loss, most in ((0.2, {None, Codec.KIVI8, Codec.KIVI4}), (0.1, {None, Codec.KIVI8}), (0.01, {None})):
        books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
        reader = losing(max_loss, {"kivi8-1": 0.1, "kivi4-1": 0.2})
        for _ in range(3):
            books.use(keys(*range(12)), reader)
        assert set(books.held.values()) <= most
        assert max_loss < 0.1 or any(books.held.values())


def test_a_chunk_that_was_encoded_further_is_not_counted_on_where_that_loses_too_much() -> None:
    """4 bits are within the bound, and 4 bits out of 8 are not, or nobody has measured them."""
    for further in ({"kivi8-1>kivi4-1": 0.4}, {}):
        books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
        reader = losing(0.2, {"kivi8-1": 0.1, "kivi4-1": 0.2, **further})
        for _ in range(3):
            books.use(keys(*range(12)), reader)
        chained = [key for key, codec in books.held.items() if codec is Codec.KIVI4]
        for key in chained:
            encoded = Encoded(Codec.KIVI4, SHAPE, 4, 0.1, 0.1, before=(Codec.KIVI8,))
            assert not reader.takes(encoded)
            books.policy.note_made(key, encoded)
        for _ in range(3):
            books.use(keys(*range(12)), reader)
        assert chained
        assert Codec.KIVI4 not in {books.held.get(key) for key in chained}


def test_a_reader_that_names_a_wrong_shape_changes_nothing_for_many_others() -> None:
    """Its shape has the same bytes. It comes first, so chunks are encoded for it; then they are encoded anew, once."""
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    wrong = replace(READING, shape=replace(SHAPE, element=Element.FLOAT16))
    books.use(keys(*range(8)), wrong)
    for _ in range(10):
        books.use(keys(*range(8)))
    encoded = [key for key, codec in books.held.items() if codec is not None]
    assert encoded
    assert {books.readings[key].shape for key in encoded} == {SHAPE}
    before = books.change_count
    for turn in range(100):
        books.use(keys(*range(8)), wrong if turn % 50 == 0 else READING)
    assert books.change_count - before <= 16, "as many as without it: some chunks have risen in turn"
    assert {books.readings[key].shape for key in encoded} == {SHAPE}


def test_readers_of_two_shapes_in_turn_do_not_change_the_form_at_each_turn() -> None:
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    other = replace(READING, shape=LayerShape(32, 64, Element.BFLOAT16))
    assert other.exact_bytes == EXACT
    for turn in range(60):
        books.use(keys(*range(8)), other if turn % 2 else READING)
    before = books.change_count
    for turn in range(20):
        books.use(keys(*range(8)), other if turn % 2 else READING)
    assert books.change_count - before <= 8


def test_a_codec_that_breaks_the_readers_bound_is_not_used_for_it() -> None:
    policy = MemoryPolicy(4 * EXACT, SETTINGS)
    for codec, error in ((Codec.KIVI8, 0.01), (Codec.KIVI4, 0.1), (Codec.KIVI2, 0.6)):
        policy.readers.note_error(READING, codec, error)
    books = Books(policy)
    strict = Reading(SHAPE, 4, READING.codecs, max_error=0.05)
    for _ in range(3):
        books.use(keys(*range(8)), strict)
    assert set(books.held.values()) <= {None, Codec.KIVI8}


def test_a_chunk_that_is_used_again_and_again_stays_when_others_pass_through() -> None:
    """The order of the bounded buckets decides here, too; 002's counts would need a half-life for that."""
    books = Books(MemoryPolicy(3 * EXACT, UtilitySettings({})))
    for number in range(300):
        books.use(keys(0))
        books.use(keys(1 + number))
    assert ("file", 0) in books.held


@pytest.mark.parametrize("eviction", list(Eviction))
def test_every_order_of_eviction_encodes(eviction: Eviction) -> None:
    """Switching compression on keeps the order that was chosen: each turn of a chunk is a step down its ladder."""
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS, eviction=eviction))
    for _ in range(3):
        books.use(keys(*range(8)))
    assert len(books.held) >= 6
    assert any(books.held.values())


def test_chunks_that_are_asked_for_once_are_forgotten() -> None:
    """Whoever asks for ever new chunks must not fill the policy's memory, also where none of them is ever kept."""
    for capacity_bytes in (0, 2 * EXACT):
        books = Books(MemoryPolicy(capacity_bytes, SETTINGS, ghost_count_max=50))
        for number in range(300):
            books.use(keys(number), READING if number % 2 else None)
        assert books.policy.known_count <= 60


def test_errors_of_a_chunk_are_remembered_for_a_few_shapes() -> None:
    """Each reader says the shape of a chunk, and a chunk of some megabytes has thousands."""
    policy = MemoryPolicy(EXACT, SETTINGS)
    shapes = [LayerShape(tokens, 128, Element.BFLOAT16) for tokens in range(1, 200)]
    for shape in shapes:
        policy.readers.note_unencodable(("file", 0), shape)
    (errors,) = policy.readers._chunk_errors.values()
    assert len(errors) == CHUNK_ERRORS_MAX
    assert {shape for shape, _ in errors} == set(shapes[-CHUNK_ERRORS_MAX:])


def test_errors_of_all_chunks_are_remembered_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is no number in eight shapes and all codecs had 112 of them, and 131,072 such chunks 2.2 GiB."""
    monkeypatch.setattr(reader_forms, "ALL_ERRORS_MAX", 20)
    readers = ReaderForms(SETTINGS)
    shapes = [LayerShape(tokens, 128, Element.BFLOAT16) for tokens in range(1, 9)]
    for number in range(10):
        for shape in shapes:
            readers.note_unencodable((f"file-{number}", 0), shape)
    counts = {key: len(errors) for key, errors in readers._chunk_errors.items()}
    assert counts == {("file-8", 0): 8, ("file-9", 0): 8}
    assert readers._error_count == 16


def test_a_chunk_comes_back_exact_once_its_uses_have_cost_what_four_loads_do() -> None:
    """At 8 bits of quality 0.97 a use loses 0.03 ms, and a load takes 0.33 ms. Others, which nobody uses, make room."""
    figures = {Codec.KIVI8: CodecFigures(0.97, 1e12)}
    books = Books(MemoryPolicy(4 * EXACT, replace(SETTINGS, codecs=figures)))
    reading = replace(READING, codecs=(Codec.KIVI8,))
    for _ in range(20):
        books.use(keys(*range(6)), reading)
    encoded = next(key for key, codec in books.held.items() if codec is not None)
    uses = 0
    while books.held[encoded] is not None and uses < 120:
        books.use([encoded], reading)
        uses += 1
    assert 1 <= uses <= 90, "44, or twice as many where it has tried before"


def test_chunks_that_are_used_alike_do_not_change_places() -> None:
    """All have cost a load in the end; but what would make room for one is worth as much."""
    books = Books(MemoryPolicy(4 * EXACT, SETTINGS))
    for _ in range(20):
        books.use(keys(*range(6)))
    before = books.change_count
    for _ in range(1000):
        books.use(keys(*range(6)))
    assert books.change_count == before


USES = st.lists(
    st.tuples(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True), st.integers(0, 4)), max_size=60
)


@given(USES, st.integers(0, 7 * EXACT), st.lists(st.integers(0, 11), max_size=5))
def test_the_books_are_those_of_the_decisions(
    uses: list[tuple[list[int], int]], capacity_bytes: int, gone: list[int]
) -> None:
    """Whatever is used by whom: the bytes are never more than the capacity, and each decision fits the last one."""
    four, two = Reading(SHAPE, 4, (Codec.KIVI4,)), Reading(SHAPE, 4, (Codec.KIVI2,), max_error=0.2)
    other = Reading(LayerShape(32, 64, Element.BFLOAT16), 4, (Codec.KIVI4, Codec.KIVI8), max_error=0.1)
    readings = [None, READING, four, two, other]
    books = Books(MemoryPolicy(capacity_bytes, SETTINGS))
    for at, (numbers, reader) in enumerate(uses):
        books.use(keys(*numbers), readings[reader])
        assert books.policy.used_bytes == books.nbytes <= capacity_bytes
        for key in books.held:
            if at % 3 == 0 and books.held[key] is not None:
                made(books, key, numbers[0] / 20, books.readings[key])
        if at % 7 == 3:
            books.policy.remove(keys(*gone))
            for key in keys(*gone):
                books.held.pop(key, None)


def test_a_reading_takes_what_it_named() -> None:
    encoded = Encoded(Codec.KIVI4, SHAPE, 4, 0.1, 0.08)
    assert READING.takes(encoded)
    assert not Reading(SHAPE, 4, (Codec.KIVI8,)).takes(encoded)
    assert not Reading(SHAPE, 5, READING.codecs).takes(encoded)
    assert not Reading(LayerShape(16, 64, Element.FLOAT32), 4, READING.codecs).takes(encoded)
    assert not READING.bounded(0.05).takes(encoded)
    assert READING.bounded(0.2).bounded(None).takes(encoded)
