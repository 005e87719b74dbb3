"""The loss of each form of KV on a real model: the KV of a context is encoded and decoded, and the model is asked for
the text that follows and for facts that stand in the context. Needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from objectcache.calibration.form_losses import FormLoss, TextSample
from objectcache.calibration.probes import Ids, Probe
from objectcache.calibration.quality import States, coded, logits_behind, prefix_states
from objectcache.calibration.real_model import CONTROL_KL_MAX, RealModel, UnusableModelError, last_logits
from objectcache.kv_codecs.chains import Chain, chain_name
from objectcache.kv_codecs.layer import Codec


@dataclass(frozen=True, slots=True)
class Scored:
    """The answers on one form of the KV: log-probabilities of all next tokens of the continuation, of shape
    (tokens, vocabulary), and of the right code of each fact, with whether all of it is the most likely one.
    """

    continuation: torch.Tensor
    facts: tuple[tuple[float, bool], ...]


def form_losses(
    real: RealModel,
    probes: Sequence[Probe],
    codecs: Sequence[Codec],
    advance: Callable[[int], None],
    chains: Sequence[Chain] = (),
) -> list[FormLoss]:
    """The losses of exact KV, which are 0, of each codec, and of chunks that have passed each of the chains; `advance`
    is called for each of them and each probe. Raises UnusableModelError.
    """
    forms = [*((codec,) for codec in codecs), *chains]
    unchanged: list[TextSample] = []
    samples: dict[Chain, list[TextSample]] = {form: [] for form in forms}
    errors: dict[Chain, list[float]] = {form: [] for form in forms}
    sizes = {form: [0, 0] for form in forms}
    for number, probe in enumerate(probes):
        states = prefix_states(real.model, _batch(probe.context))
        exact = scored(real, states, probe)
        if number == 0:
            check_answers(real, probe, exact)
        unchanged.append(text_sample(exact, exact, probe))
        for form in forms:
            made = coded(states, form[0], further=form[1:])
            samples[form].append(text_sample(scored(real, made.states, probe), exact, probe))
            errors[form] += made.errors
            sizes[form][0] += made.encoded_bytes
            sizes[form][1] += made.exact_bytes
            advance(1)
    losses = [FormLoss(Codec.EXACT.value, 1.0, 0.0, 0.0, tuple(unchanged))]
    return losses + [
        FormLoss(
            chain_name(form), sizes[form][0] / sizes[form][1], max(errors[form]),
            sum(errors[form]) / len(errors[form]), tuple(samples[form]),
        )
        for form in forms
    ]  # fmt: skip


def scored(real: RealModel, states: States, probe: Probe) -> Scored:
    """The answers behind this KV of the probe's context."""
    asked = [_batch(probe.continuation), *(_batch(fact.question + fact.answer[:-1]) for fact in probe.facts)]
    logits = [each[0] for each in logits_behind(real.model, states, asked, len(probe.context))]
    facts = []
    for fact, each in zip(probe.facts, logits[1:], strict=True):
        told = each[len(fact.question) - 1 :].log_softmax(-1)
        right = torch.tensor(fact.answer)
        log_prob = float(told.gather(-1, right[:, None]).sum())
        facts.append((log_prob, bool((told.argmax(-1) == right).all())))
    return Scored(logits[0].log_softmax(-1), tuple(facts))


def text_sample(mine: Scored, exact: Scored, probe: Probe) -> TextSample:
    """One form's losses on one text."""
    theirs, ours = exact.continuation[:-1], mine.continuation[:-1]
    wanted = torch.tensor(probe.continuation[1:])[:, None]
    changes = [own[0] - other[0] for own, other in zip(mine.facts, exact.facts, strict=True)]
    return TextSample(
        kl=divergence(theirs, ours),
        nll_change=float((theirs.gather(-1, wanted) - ours.gather(-1, wanted)).mean()),
        agreement=float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()),
        recall_change=sum(changes) / len(changes),
        recall_right=sum(right for _, right in mine.facts) / len(mine.facts),
    )


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """The mean KL of log-probabilities from the exact ones, in nats."""
    return float((exact.exp() * (exact - other)).sum(-1).double().mean())


def check_answers(real: RealModel, probe: Probe, exact: Scored) -> None:
    """Refuse a model whose cache does not give its own answers back: what is measured behind it would be the cache's
    fault and no codec's. Raises UnusableModelError.
    """
    whole: Ids = probe.context + probe.continuation
    with torch.inference_mode():
        ids, kept = _batch(whole).to(real.model.device), last_logits(real.model, len(probe.continuation))
        logits = real.model(ids, use_cache=False, **kept).logits[0, -len(probe.continuation) :]
    found = divergence(logits.float().cpu().log_softmax(-1), exact.continuation)
    if not found <= CONTROL_KL_MAX:
        raise UnusableModelError(f"its answers behind its own cache are other ones (KL {found:.3g})")


def _batch(ids: Ids) -> torch.Tensor:
    return torch.tensor([ids])
