"""The protection of a run's clients: whether there is any, its meaning, and its limits."""

from __future__ import annotations

from secure_fed.report.formatting import at_most, listed
from secure_fed.report.page.guarantee import Guarantee, stated
from secure_fed.report.page.markup import bullets, folded, paragraph, section
from secure_fed.report.page.masks import masked
from secure_fed.report.page.meaning import in_detail
from secure_fed.report.page.observers import share
from secure_fed.report.page.record import RunRecord
from secure_fed.report.page.server_view import server_view

_WEAK = 10.0  # e^10 is above 20,000


def privacy(record: RunRecord) -> str:
    """The verdict, its meaning for a guess, and folded away, the limits of the guarantee and the server's view."""
    guarantee = stated(record)
    if guarantee is None:
        return _unprotected(record)
    return _guaranteed(record, guarantee) if guarantee.holds else _void(guarantee)


def short(record: RunRecord) -> str:
    """Epsilon as one of the key numbers."""
    guarantee = stated(record)
    if guarantee is None:
        return "no guarantee"
    return at_most(guarantee.epsilon) if guarantee.holds else "void"


def void(record: RunRecord) -> bool:
    """Whether privacy was requested and the run has none."""
    guarantee = stated(record)
    return record.private if guarantee is None else not guarantee.holds


def _unprotected(record: RunRecord) -> str:
    asked = f"The run's settings protect unit {record.config.privacy.unit!r}, but its files state no guarantee."
    return section(
        "Privacy: NOT PRIVATE" if void(record) else "Privacy: this run is not protected",
        paragraph(asked, "verdict") if void(record) else "",
        paragraph(_ONLY_MASKS if masked(record) else _NOTHING, "verdict"),
        paragraph(_NO_LIMIT),
        folded("What the server sees", server_view(record, None)),
        css_class="privacy warning",
    )


def _void(guarantee: Guarantee) -> str:
    return section(
        "Privacy: NOT PRIVATE",
        paragraph("This run is NOT PRIVATE, although it added noise.", "verdict"),
        paragraph(_BOUNDLESS if guarantee.secret else _INJECTED),
        paragraph(_TREAT if guarantee.secret else f"{_TREAT} {_AGAIN}"),
        css_class="privacy warning",
    )


def _guaranteed(record: RunRecord, guarantee: Guarantee) -> str:
    epsilon = f"({at_most(guarantee.epsilon)}, {guarantee.delta:g})"
    is_private = "is" if record.result else "is planned to be"
    return section(
        f"Privacy: differentially private, epsilon {at_most(guarantee.epsilon)}",
        paragraph(
            f"This run {is_private} {epsilon}-differentially private. Protected: {guarantee.terms['unit']}.", "verdict"
        ),
        "" if record.result else paragraph(_PLANNED, "notice"),
        _weakness(guarantee),
        paragraph(_meaning(guarantee)),
        _personal(record),
        in_detail(guarantee),
        folded(
            "What the guarantee leaves open",
            paragraph(f"{_LIMITS[guarantee.unit]} {_THIS_PAGE}"),
            paragraph("Not covered:") + bullets(guarantee.terms["not_covered"])
            if guarantee.terms["not_covered"]
            else "",
        ),
        folded("What the server sees", server_view(record, guarantee)),
        css_class="privacy",
    )


def _meaning(guarantee: Guarantee) -> str:
    found = share(guarantee.epsilon, guarantee.delta)
    most = "the bound is above 99.99 %, which rules out next to nothing" if found == "100 %" else f"in at most {found}"
    return (
        f"Imagine somebody who has the model, knows all other training data, and has to guess whether {_change(guarantee)}."
        f" Both answers are equally likely beforehand. The guess is right {most} of such cases. A coin is right in 50 %."
        " This holds whatever else this person knows or computes."
    )


def _change(guarantee: Guarantee) -> str:
    if guarantee.unit == "client" and guarantee.replaced:
        return "a client held its own data or other data"
    return _CHANGES[guarantee.unit]


def _personal(record: RunRecord) -> str:
    """A warning about tensors that stay with their client, and therefore carry no noise."""
    names = record.config.method.personal
    if not names or record.config.privacy.unit != "client":
        return ""
    return paragraph(
        f"The personal tensors ({listed(names)}) carry no noise, since they stay with their client. The run directory and an"
        " export of one client's model hold them as they were trained: do not pass these on.",
        "notice",
    )


def _weakness(guarantee: Guarantee) -> str:
    """A warning about an epsilon that is too large to mean much."""
    if max(guarantee.epsilon, guarantee.epsilon_participants) <= _WEAK:
        return ""
    alone = "" if guarantee.epsilon > _WEAK else " against readers who also know who took part"
    most = at_most(max(guarantee.epsilon, guarantee.epsilon_participants))
    return paragraph(
        f"A weak guarantee{alone}: epsilon is {most}. With an epsilon above {_WEAK:g}, an observation may be more than 20,000"
        " times as likely with somebody's data as without. By itself that rules out next to nothing.",
        "notice",
    )


_CHANGES = {
    "client": "one client's data were used or not",
    "example": "one example was among the training examples of its client or not",
    "group": "all examples of one person at one client were among its training examples or not",
}
_LIMITS = {
    "client": (
        "The model may reveal whatever holds for many clients: learning that is its purpose. A person whose data lie with"
        " several clients is protected less than one client is."
    ),
    "example": (
        "The model may reveal whatever holds for many examples, and what distinguishes one client from another. The unit is one"
        " example: a person with several examples is protected less. privacy.unit = 'group' protects all examples of a person"
        " together."
    ),
    "group": (
        "The model may reveal whatever holds for many persons, and what distinguishes one client from another. The unit is one"
        " person at one client: a person with examples at several clients is protected less."
    ),
}
_THIS_PAGE = "The guarantee is about the model. Files of the run directory name the clients."
_NOTHING = "No differential privacy and no secure aggregation protect this run."
_ONLY_MASKS = (
    "No differential privacy protects this run. Secure aggregation hides single contributions, and nothing else."
)
_NO_LIMIT = (
    "Nothing limits what the trained model reveals about one client or one text, so there is no epsilon to state. If the"
    " training texts are personal data, treat the model and the contributions as personal data too."
)
_PLANNED = (
    "The run is not finished. These numbers are those of its whole plan, and cover everything released so far. Rounds that were"
    " interrupted and repeated are charged in its ledger, and will be in these numbers at the end."
)
_INJECTED = (
    "Its noise or its secret coins were seeded or injected, as in tests and experiments. Whoever knows them can subtract the"
    " noise. The statement at the end is no guarantee: it says what secret noise would have guaranteed."
)
_BOUNDLESS = "Its noise is so small beside the clip norm that no finite epsilon can be stated."
_TREAT = "Treat the model and the contributions as you treat the training texts themselves."
_AGAIN = "For a model to publish, run it again from the command line, or in Python without the argument entropy."
