"""What the server sees of the clients of a run, with masks and without, for somebody who has never heard of either."""

from __future__ import annotations

from secure_fed.report.formatting import at_most
from secure_fed.report.page.guarantee import Guarantee
from secure_fed.report.page.markup import paragraph, subsection, table
from secure_fed.report.page.masks import colluding, masked
from secure_fed.report.page.record import RunRecord

Case = str  # where the noise is, or "nowhere"


def sight(record: RunRecord, guarantee: Guarantee | None) -> str:
    """What reaches the server, what it could make of it, and against which server that holds."""
    case: Case = guarantee.place if guarantee else "nowhere"
    told = _masked(record, case) if masked(record) else paragraph(_IN_THE_CLEAR[case])
    beside = _participants(guarantee) if guarantee else ""
    played = _SIMULATED_MASKS if masked(record) else _SIMULATED
    return subsection("What the server sees", told, paragraph(f"{beside} {played}".strip()))


def _masked(record: RunRecord, case: Case) -> str:
    hidden = case == "shares" and record.config.privacy.hidden_cohort
    few = record.draws_by_coins and not record.config.secure_aggregation.active
    who = ("that all take part, not who of them trains",) if hidden else ("yes",)
    rows = (
        ("what one client sent", "only if coins draw no other" if few else "no", _ALONE[case]),
        ("the sum over a round's clients", *_SUM[case]),
        ("who takes part in a round, and when", *who, "yes"),
        ("the model", "yes", "yes"),
    )
    return (
        paragraph(_MASKS + (_FEW if few else ""))
        + table(("Does the server see ...", "in this run, with masks", "without masks"), rows)
        + paragraph(_MASKED[case] + (_HIDDEN if hidden else ""))
        + paragraph(_assumed(record, case))
    )


def _assumed(record: RunRecord, case: Case) -> str:
    """Against which server masks are good, and how many clients may help it."""
    settings = record.config.secure_aggregation
    server = _ACTIVE if settings.active else _PASSIVE
    if settings.active and record.draws_by_coins and case != "shares":
        server = f"{_ACTIVE} {_ASKS}"
    return f"{server} It is assumed that {colluding(record)}. Masks are no limit to what a sum, or the model, tells."


def _participants(guarantee: Guarantee) -> str:
    """Against whom the other epsilon is, where noise is on sums."""
    seen = at_most(guarantee.epsilon_participants)
    if guarantee.place == "server":
        return f"Against clients of the same round, or anybody else who sees who takes part, epsilon is {seen}."
    if guarantee.place == "shares":
        return f"Against the server, clients of the same round, or anybody else who sees who takes part, epsilon is {seen}."
    return ""


_MASKS = (
    "Before it left its machine, every contribution was covered with random masks. They cancel where the contributions of a"
    " round are added up, and nowhere else: the server learns their sum, and nothing else of any of them."
)
_FEW = (
    " A coin for every client draws who contributes to a sum. Where they draw few, it is the sum of these few; where they draw"
    " one client alone, it is what that client sent."
)
_ALONE = {
    "nowhere": "yes",
    "server": "yes, without noise",
    "shares": "yes, with that client's share of the noise, which is too little to protect it",
    "contribution": "yes, with that client's noise in it",
    "gradients": "yes, made by noised training",
}
_SUM = {
    "nowhere": ("yes", "yes"),
    "server": ("yes, without noise", "yes, without noise"),
    "shares": ("yes, with everybody's share of the noise in it", "yes, with everybody's share of the noise in it"),
    "contribution": ("yes, with every client's noise in it", "yes, with every client's noise in it"),
    "gradients": ("yes, made by noised training", "yes, made by noised training"),
}
_MASKED = {
    "nowhere": "There is no noise in that sum: what it tells of one client is limited by nothing but the others in it.",
    "server": (
        "The server adds the noise when it has the sum: against whoever runs it, or reads what reaches it, there is no"
        " guarantee, and it has to be trusted with what the sums tell."
    ),
    "shares": (
        "Every client put its share of the noise into its contribution before it masked it, so that there is no sum without"
        " noise anywhere. The guarantee holds against the server too, under what is assumed below."
    ),
    "contribution": (
        "Every client's own noise is enough to protect it. The guarantee holds against the server too, and would without the"
        " masks: nobody but the client's own machine has to be trusted."
    ),
    "gradients": (
        "The noise is in every client's own training. The guarantee holds against the server too, and would without the masks:"
        " nobody but the client's own machine has to be trusted."
    ),
}
_HIDDEN = (
    " Every client sends something in every round and tosses a coin of its own whether to train for it, so nobody else knows"
    " who did; but a client that trains may take longer to answer."
)
_PASSIVE = (
    "Masks hold against a server that follows the protocol and remembers all that it sees. One that lies, about keys or about"
    " who is still there, may read single clients; secure_aggregation.active = true is against that."
)
_ACTIVE = (
    "Masks hold against a server that lies as well: where it does, about keys or about who is still there, the clients notice"
    " and stop. Whoever hands out the clients' signing keys has to be trusted to hand out the right ones."
)
_ASKS = (
    "Its coins say who contributes to a sum, and the others send zeros. It has to show all of them one list of contributors,"
    " and they stop unless at least so many contribute that two of them are honest."
)
_IN_THE_CLEAR = {
    "nowhere": (
        "Each client's contribution is visible to the server: whoever runs the server, or can read what reaches it, sees what"
        " every single client sent, and may infer from it which texts that client holds."
    ),
    "server": (
        "The server sees every client's contribution before the noise: against whoever runs it, or reads what reaches it,"
        " there is no guarantee, and it has to be trusted with what the contributions tell. There is no secure aggregation,"
        " which would show it their sums alone."
    ),
    "contribution": (
        "The server sees every client's contribution with that client's noise in it, and who takes part when. The guarantee"
        " holds against the server too: nobody but the client's own machine has to be trusted."
    ),
    "gradients": (
        "The server sees what every client's noised training came to, and who takes part when. The guarantee holds against"
        " the server too: nobody but the client's own machine has to be trusted."
    ),
}
_SIMULATED = "This run was a simulation: one process held the data of all clients and played the server."
_SIMULATED_MASKS = (
    "This run was a simulation: one process held the data, the keys and the masks of all clients and played the server. It"
    " shows that the protocol works and what it takes; from whoever ran that process it kept nothing."
)
