"""The protection of a run's clients: whether there is any, its meaning and its limits, and the server's view of the clients.

The server's view, with masks and without, is for readers who know neither.
"""

from __future__ import annotations

from privacy.statement import SEES_COHORTS
from secure_fed.report.formatting import at_most, listed
from secure_fed.report.guarantee import GUESSED, PRESENCE, SIMULATED, Guarantee, in_detail, share, stated, together
from secure_fed.report.markup import bullets, folded, paragraph, section, table
from secure_fed.report.masks import colluding, masked
from secure_fed.report.record import RunRecord

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
    other_runs = _LEDGER if record.config.privacy.ledger else _AT_NODES if record.deployed else _ALONE_HERE
    return section(
        f"Privacy: differentially private, epsilon {at_most(guarantee.epsilon)}",
        paragraph(
            f"This run {is_private} {epsilon}-differentially private. Protected: {guarantee.terms['unit']}.", "verdict"
        ),
        paragraph(f"{together(guarantee)} {other_runs}") if record.result else "",
        "" if record.result else paragraph(_PLANNED, "notice"),
        _weakness(guarantee),
        paragraph(_meaning(guarantee)),
        _personal(record),
        in_detail(guarantee),
        folded(
            "What the guarantee leaves open",
            paragraph(_LIMITS[guarantee.unit]),
            paragraph("Not covered:") + bullets(guarantee.terms["not_covered"])
            if guarantee.terms["not_covered"]
            else "",
        ),
        folded("Who may read the run's files", paragraph(_FILES)),
        folded("What the server sees", server_view(record, guarantee)),
        css_class="privacy",
    )


def _meaning(guarantee: Guarantee) -> str:
    guessed = GUESSED[guarantee.unit]
    if guarantee.unit == "client" and guarantee.replaced:
        guessed = "a client held its own data or other data"
    found, by_epsilon = (share(guarantee.epsilon, guarantee.delta, mu) for mu in (guarantee.mu, None))
    most = "the bound is above 99.99 %, which rules out next to nothing" if found == "100 %" else f"in at most {found}"
    loose = "" if found == by_epsilon else f" with this noise; {by_epsilon} is all that epsilon alone proves"
    return (
        f"Imagine somebody who has the model, knows all other training data, and has to guess whether {guessed}. Both answers"
        " are equally likely beforehand; where “yes” is rarer, its chance starts lower. The guess is right"
        f" {most} of such cases{loose}. A guess at random is right in 50 %."
        f" This holds whatever else this person knows or computes. {PRESENCE}"
    )


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
    alone = "" if guarantee.epsilon > _WEAK else f" against {SEES_COHORTS}"
    most = at_most(max(guarantee.epsilon, guarantee.epsilon_participants))
    return paragraph(
        f"A weak guarantee{alone}: epsilon is {most}. With an epsilon above {_WEAK:g}, an observation may be more than 20,000"
        " times as likely with somebody's data as without. By itself that rules out next to nothing.",
        "notice",
    )


def server_view(record: RunRecord, guarantee: Guarantee | None) -> str:
    """The data that reaches the server, possible inferences from it, and the kind of server that this assumes."""
    case: str = guarantee.place if guarantee else "nowhere"
    seen = _masked(record, case) if masked(record) else paragraph(_IN_THE_CLEAR[case])
    participants = _participants(guarantee) if guarantee else ""
    return seen + paragraph(f"{participants} {_DEPLOYED if record.deployed else SIMULATED}".strip())


def _masked(record: RunRecord, case: str) -> str:
    hidden = case == "shares" and record.config.privacy.hidden_cohort
    few = record.draws_by_coins and not record.config.secure_aggregation.active
    who = ("that all take part, not which of them train",) if hidden else ("yes",)
    rows = (
        ("what one client sent", "only if no other is drawn" if few else "no", _ALONE[case]),
        ("the sum over a round's clients", _SUM[case], _SUM[case]),
        ("who takes part in a round, and when", *who, "yes"),
        ("the model", "yes", "yes"),
    )
    return (
        paragraph(_MASKS + (_FEW if few else ""))
        + table(("Does the server see ...", "in this run, with masks", "without masks"), rows)
        + paragraph(_MASKED[case] + (_HIDDEN if hidden else ""))
        + paragraph(_assumed(record, case))
    )


def _assumed(record: RunRecord, case: str) -> str:
    """The kind of server that the masks protect against, and the number of clients that may collude with it."""
    settings = record.config.secure_aggregation
    server = _ACTIVE if settings.active else _PASSIVE
    if settings.active and record.draws_by_coins and case != "shares":
        server = f"{_ACTIVE} {_LISTED}"
    return f"{server} It is assumed that {colluding(record)}. Masks do not limit what a sum, or the model, reveals."


def _participants(guarantee: Guarantee) -> str:
    """The observers that the second epsilon holds against, where noise is on sums."""
    seen = at_most(guarantee.epsilon_participants)
    server = "the server, and " if guarantee.place == "shares" else ""
    return f"Against {server}{SEES_COHORTS}, epsilon is {seen}." if guarantee.place in ("sum", "shares") else ""


_ALONE_HERE = (
    "This epsilon covers this run alone: each further run on the same data costs its own as well, and nobody counts it, since"
    " no ledger is named (privacy.ledger)."
)
_AT_NODES = "This epsilon covers this run alone: each member's own ledger adds up the runs on its data."
_LEDGER = "This epsilon covers this run alone; the runs of its ledger together are under “For the record”."
_LIMITS = {
    "client": "The model may reveal whatever holds for many clients: learning that is its purpose.",
    "example": (
        "The model may reveal whatever holds for many examples, and what distinguishes one client from another. The unit is one"
        " example: privacy.unit = 'person' protects all examples of a person together."
    ),
    "person": (
        "The model may reveal whatever holds for many persons, and what distinguishes one client from another. The unit is one"
        " person at one client."
    ),
}
_FILES = (
    "What lies outside of private/ in the run's folder may be passed on: what was released, the settings (with paths of files,"
    " and the site), and what is public, such as the clients' names. If test rows were held out of the data, result.json has"
    " the accuracy on them, which no noise covers. What lies in private/ is for the owner of the data alone."
)
_NOTHING = "No differential privacy and no secure aggregation protect this run."
_ONLY_MASKS = "No differential privacy protects this run. Masks hide single contributions, and nothing else."
_NO_LIMIT = (
    "Nothing limits what the trained model reveals about one client or one text, so there is no epsilon to state. If the"
    " training texts are personal data, treat the model and the contributions as personal data too."
)
_PLANNED = (
    "Not finished: these are the whole plan's numbers, and cover all releases so far. Repeated rounds add to them."
)
_INJECTED = (
    "Its noise or its secret coins were seeded or injected, as in tests and experiments. Whoever knows them can subtract the"
    " noise. The statement at the end is no guarantee: it says what secret noise would have guaranteed."
)
_BOUNDLESS = "Its noise is so small beside the clip norm that no finite epsilon can be stated."
_TREAT = "Treat the model and the contributions as you treat the training texts themselves."
_AGAIN = "For a model to publish, run it again from the command line, or in Python without the argument entropy."
_MASKS = (
    "Every client covers its contribution with random masks before sending it. The masks cancel when the contributions of a"
    " round are added up, and only then: the server learns the sum, and nothing else about a single contribution."
)
_FEW = (
    " Each client contributes to a sum at random. If few clients are drawn, the sum is over these few; if one client alone is"
    " drawn, the sum is that client's contribution."
)
_ALONE = {
    "nowhere": "yes",
    "sum": "yes, without noise",
    "shares": "yes, with that client's share of the noise, too little to protect it",
    "contribution": "yes, with that client's noise",
    "gradients": "yes, made by noised training",
}
_SUM = {**_ALONE, "shares": "yes, with all shares of the noise", "contribution": "yes, with every client's noise"}
_OWN_MACHINE = "The guarantee holds against the server too, masks or not: a client has to trust its own machine only."
_MASKED = {
    "nowhere": "The sum carries no noise: a client is hidden by the other contributions in it, and by nothing else.",
    "sum": (
        "The server adds the noise after it has received the sum. Against whoever runs the server, or reads what reaches it,"
        " there is no guarantee: it is trusted with the sums."
    ),
    "shares": (
        "Every client adds its share of the noise before masking, so no sum without noise exists anywhere. The guarantee holds"
        " against the server too, under the assumptions below."
    ),
    "contribution": f"Every client's own noise is enough to protect it. {_OWN_MACHINE}",
    "gradients": f"The noise is in every client's own training. {_OWN_MACHINE}",
}
_HIDDEN = (
    " Every client sends a contribution in every round, and a secret coin of its own decides whether it trains for it. Nobody"
    " else knows who trained; but a client that trains may take longer to answer."
)
_PASSIVE = (
    "Masks hold against a server that follows the protocol and remembers all that it sees. A server that lies about keys or"
    " survivors may read single clients; secure_aggregation.active = true protects against that."
)
_ACTIVE = (
    "Masks hold against a server that lies, too: the clients notice lies about keys or survivors, and stop. Whoever hands out"
    " the clients' signing keys is trusted to hand out the right ones."
)
_LISTED = (
    "The server draws at random who contributes to a sum, and the other clients send zeros. The server must show all clients"
    " one list of contributors, and they stop unless the list is long enough to contain two honest clients."
)
_IN_THE_CLEAR = {
    "nowhere": (
        "Each client's contribution is visible to the server. Whoever runs the server, or reads what reaches it, sees what"
        " every single client sent, and may infer which texts that client holds."
    ),
    "sum": (
        "The server sees every client's contribution before it adds the noise. Against whoever runs the server, or reads what"
        " reaches it, there is no guarantee: it is trusted with the contributions. With secure aggregation it would see their"
        " sums only; this run has none."
    ),
    "contribution": f"The server sees every client's contribution with its noise, and who takes part when. {_OWN_MACHINE}",
    "gradients": f"The server sees what every client's noised training sends, and who takes part when. {_OWN_MACHINE}",
}
_DEPLOYED = (
    "This run was no simulation: every client was a separate node with its own data and keys, and the coordinator acted as the"
    " server. The run's files do not show who ran the nodes: nothing is hidden from whoever runs all of them."
)
