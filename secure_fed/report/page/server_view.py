"""The server's view of a run's clients, with masks and without, for readers who know neither."""

from __future__ import annotations

from secure_fed.report.formatting import at_most
from secure_fed.report.page.guarantee import Guarantee
from secure_fed.report.page.markup import paragraph, table
from secure_fed.report.page.masks import colluding, masked
from secure_fed.report.page.record import RunRecord


def server_view(record: RunRecord, guarantee: Guarantee | None) -> str:
    """The data that reaches the server, possible inferences from it, and the kind of server that this assumes."""
    case: str = guarantee.place if guarantee else "nowhere"
    seen = _masked(record, case) if masked(record) else paragraph(_IN_THE_CLEAR[case])
    participants = _participants(guarantee) if guarantee else ""
    return seen + paragraph(f"{participants} {_whose_machines(record)}".strip())


def _whose_machines(record: RunRecord) -> str:
    """Whether the clients were separate from the server, and the consequence for what the masks hid."""
    if record.deployed:
        return _DEPLOYED_MASKS if masked(record) else _DEPLOYED
    return _SIMULATED_MASKS if masked(record) else _SIMULATED


def _masked(record: RunRecord, case: str) -> str:
    hidden = case == "shares" and record.config.privacy.hidden_cohort
    few = record.draws_by_coins and not record.config.secure_aggregation.active
    who = ("that all take part, not which of them train",) if hidden else ("yes",)
    rows = (
        ("what one client sent", "only if coins draw no other" if few else "no", _ALONE[case]),
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
    if guarantee.place == "sum":
        return f"Against clients of the same round, and anybody else who sees who takes part, epsilon is {seen}."
    if guarantee.place == "shares":
        return f"Against the server, clients of the same round, and anybody else who sees who takes part, epsilon is {seen}."
    return ""


_MASKS = (
    "Every client covers its contribution with random masks before sending it. The masks cancel when the contributions of a"
    " round are added up, and only then: the server learns the sum, and nothing else about a single contribution."
)
_FEW = (
    " A coin for every client decides who contributes to a sum. If the coins draw few clients, the sum is over these few; if"
    " they draw one client alone, the sum is that client's contribution."
)
_ALONE = {
    "nowhere": "yes",
    "sum": "yes, without noise",
    "shares": "yes, with that client's share of the noise, too little to protect it",
    "contribution": "yes, with that client's noise",
    "gradients": "yes, made by noised training",
}
_SUM = {
    **_ALONE,
    "shares": "yes, with all shares of the noise",
    "contribution": "yes, with every client's noise",
}
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
    "contribution": (
        "Every client's own noise is enough to protect it. The guarantee holds against the server too, even without masks: a"
        " client has to trust its own machine only."
    ),
    "gradients": (
        "The noise is in every client's own training. The guarantee holds against the server too, even without masks: a client"
        " has to trust its own machine only."
    ),
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
    "The server's coins decide who contributes to a sum, and the other clients send zeros. The server must show all clients one"
    " list of contributors, and they stop unless the list is long enough to contain two honest clients."
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
    "contribution": (
        "The server sees every client's contribution with that client's noise, and who takes part when. The guarantee holds"
        " against the server too: a client has to trust its own machine only."
    ),
    "gradients": (
        "The server sees every client's contribution, made by noised training, and who takes part when. The guarantee holds"
        " against the server too: a client has to trust its own machine only."
    ),
}
_SIMULATED = "This run was a simulation: one process held the data of all clients and acted as the server."
_SIMULATED_MASKS = (
    "This run was a simulation: one process held the data, the keys and the masks of all clients, and acted as the server. It"
    " shows that the protocol works and what it costs. It hid nothing from whoever ran that process."
)
_DEPLOYED = (
    "This run was no simulation: every client was a separate node with its own data and key, and the coordinator acted as the"
    " server. The run's files do not show who ran the nodes."
)
_DEPLOYED_MASKS = (
    "This run was no simulation: every client was a separate node with its own data, keys and masks, and the coordinator acted"
    " as the server. The run's files do not show who ran the nodes: masks hide nothing from whoever runs all of them."
)
