"""The errors of a session, by cause. No message ever contains a secret.

ProtocolError
    ParameterError     parameters that allow no session, or that are weaker than a party allows
        RangeError     a value that the codec cannot carry
    MessageError       bytes that are no message of this session, this stage and this sender
    Tampering          messages contradict each other, so a party lied; nothing is released
        Misdealt       the shares of one client's secret, opened by others, do not fit what it published
    Aborted            too few are left, and no sum is released
    Spent              the session has been unmasked already, or a list of its survivors signed
"""

from __future__ import annotations


class ProtocolError(Exception):
    """what: the sentence. who: the party concerned. stage: the stage. protected: what stayed secret nevertheless."""

    exit_code = 1

    def __init__(self, what: str, *, who: str = "", stage: str = "", protected: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.who = who
        self.stage = stage
        self.protected = protected

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.who, f"stage {self.stage}" if self.stage else "") if part)
        return self.what + (f" [{place}]" if place else "") + (f": {self.protected}" if self.protected else "")


class ParameterError(ProtocolError):
    """Parameters that are unusable, or weaker than a party allows."""

    exit_code = 2


class RangeError(ParameterError):
    """A value that the codec cannot carry."""


class MessageError(ProtocolError):
    """Bytes that are no message of this session, this stage and this sender."""


class Tampering(ProtocolError):  # noqa: N818 - a finding, and its usual name
    """Somebody lied and was caught."""


class Misdealt(Tampering):
    """The shares of a client's secret do not rebuild what it published: it dealt wrong shares, or many of their holders lied.

    `who` is that client.
    """

    @property
    def client(self) -> int:
        """The number of the client whose shares they are."""
        return int(self.who.removeprefix("client "))


class Aborted(ProtocolError):  # noqa: N818 - the way a session ended
    """Too few are left: no sum is released."""


class Spent(ProtocolError):  # noqa: N818 - a state of the session
    """The session has been unmasked already, or a list of its survivors signed."""
