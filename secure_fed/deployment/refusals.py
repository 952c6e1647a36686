"""The sentence about a refusal that leaves the node. It contains neither data nor paths.

Errors about the charter, a request or the policy's limits are sent whole: they repeat only the coordinator's own text, the
rounds that this node took part in, and limits of the policy. All other errors may quote a row of the data, a path or a number
computed from the data. The coordinator gets their kind, and the part or setting that they are about. The owner gets the whole
sentence, in the journal and in agent.log.
"""

from __future__ import annotations

from privacy.errors import BudgetExhausted, LedgerError, PrivacyError
from privacy.sampling import NotYourTurn
from protocols import errors as protocol
from secure_fed.config.run import find
from secure_fed.deployment import contents
from secure_fed.deployment.charter import CharterError
from secure_fed.deployment.envelope import EnvelopeError
from secure_fed.deployment.message_kinds import Refusal
from secure_fed.deployment.policy import PolicyError
from secure_fed.deployment.seal import Forged
from secure_fed.errors import (
    ConfigError,
    DataError,
    MethodError,
    ModelError,
    OwnLoopError,
    RequestError,
    SecureFedError,
)

Expected = SecureFedError | PrivacyError | protocol.ProtocolError


class Refused(SecureFedError):  # noqa: N818 - the node's decision
    """The node refuses to answer this envelope."""


# Errors that are sent whole; a subclass is not.
_WHOLE: tuple[type[Expected], ...] = (
    Refused,
    PolicyError,
    CharterError,
    EnvelopeError,
    Forged,
    contents.MessageError,
    RequestError,
    NotYourTurn,
    protocol.MessageError,
    protocol.Tampering,
    protocol.Misdealt,
    protocol.Aborted,
    protocol.Spent,
)
# The sentence for all other errors: the first that fits.
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (
        BudgetExhausted,
        "its budget for all federations has no room for this charter's privacy.epsilon and privacy.delta",
    ),
    (LedgerError, "the ledger of its budget cannot be used for this charter ([privacy])"),
    (PrivacyError, "it cannot give the guarantee of this charter ([privacy])"),
    (DataError, "its data do not fit the charter ([data]), or not the number of units on its card"),
    (OwnLoopError, "its owner's function for the local step broke a condition"),
    (ModelError, "its base model cannot be used, or is another: take the same model on all machines (model.name)"),
    (MethodError, "it cannot train with the charter's method ([method])"),
    (ConfigError, "it cannot use a setting of the charter"),
    (protocol.ProtocolError, "it cannot take part in the secure sum ([secure_aggregation])"),
    (Exception, "it failed"),
)


def refusal(error: Expected) -> Refusal:
    """The answer to a coordinator whose request ended with this error."""
    if type(error) in _WHOLE:
        return Refusal(type(error).__name__, str(error))
    what = next(sentence for kind, sentence in _KINDS if isinstance(error, kind))
    about = _setting(error)
    about = f", about {about}" if about and about not in what else ""
    return Refusal(
        type(error).__name__, f"{what}{about}; the node's owner finds the reason with `secure-fed node status`"
    )


def _setting(error: Expected) -> str:
    """The setting that an error is about, if it is one of a configuration; "" for any other text."""
    section, _, name = getattr(error, "setting", "").partition(".")
    try:
        find(section, name)
    except ConfigError:
        return ""
    return f"{section}.{name}"
