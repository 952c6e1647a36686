"""A client's own requirements on a session before it takes part: no server can lower them.

The bounds on thresholds and survivors are the bounds of `parameters`, with the client's own count of corrupt clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from protocols.errors import ParameterError
from protocols.keys import registry_digest
from protocols.parameters import SMALL, Parameters, is_whole


@dataclass(frozen=True)
class Policy:
    """A client's requirements on a session: minima, and the largest numbers of corrupt clients that it assumes.

    `corrupt` counts among the holders of one client's shares (on a complete graph, among all clients), `window` among any k / 2
    consecutive places of a ring, `colluding` among all invited clients. `partners` is the least value of the parameter of that
    name.
    """

    threshold: int
    survivors: int
    corrupt: int = 0
    window: int = 0
    active: bool = False  # True: passive sessions are refused
    identities: Mapping[int, bytes] = field(default_factory=dict)  # registered out of band
    clients: int = 2  # least number invited
    neighbours: int | None = None  # exactly this number, where corrupt and window were computed for it
    partners: int = 0
    colluding: int = 0

    def __post_init__(self) -> None:
        least = {"threshold": 1, "survivors": 2, "corrupt": 0, "window": 0, "clients": 2, "partners": 0, "colluding": 0}
        for name, value in least.items():
            if not is_whole(getattr(self, name), value, SMALL):
                raise ParameterError(f"{name} of the policy is {getattr(self, name)!r:.40}: it is {value} or more")

    def check(self, parameters: Parameters) -> None:
        """ParameterError unless this client may take part in such a session."""
        for sentence in self._violations(parameters):
            raise ParameterError(sentence, protected="nothing was sent")

    def _violations(self, parameters: Parameters) -> Iterator[str]:
        given = {
            "clients": len(parameters.clients),
            "threshold": parameters.threshold,
            "survivors": parameters.survivors,
        }
        for name, value in given.items():
            if value < getattr(self, name):
                yield f"the session's {name} is {value}, and this client's policy needs at least {getattr(self, name)}"
        corrupt = max(self.corrupt, self.colluding)
        if parameters.survivors < corrupt + 2:
            yield (
                f"the session releases sums of {parameters.survivors}, and with {corrupt} corrupt among them fewer than "
                f"two would be honest: raise survivors to at least {corrupt + 2}"
            )
        yield from self._of_the_holders(parameters)
        yield from self._of_the_identities(parameters)

    def _of_the_holders(self, parameters: Parameters) -> Iterator[str]:
        threshold, holders = parameters.threshold, parameters.holders
        if parameters.active and self.corrupt and self.neighbours is None:
            yield (
                "the policy expects corrupt clients but sets no number of neighbours: set neighbours, or a server "
                "could choose a graph with more corrupt neighbours"
            )
        if self.neighbours not in (None, parameters.neighbours):
            yield f"the session has {parameters.neighbours} neighbours, and this client's policy is for {self.neighbours}"
        least = (holders + self.corrupt) // 2 + 1 if parameters.active else self.corrupt + 1
        if threshold < least:
            kind = "an active" if parameters.active else "a passive"
            yield (
                f"the session's threshold is {threshold}; with {self.corrupt} corrupt among {holders} holders {kind} session "
                f"needs at least {least}: raise threshold"
            )
        if parameters.chosen:
            yield from self._of_the_choices(parameters)
        elif not parameters.complete:
            yield from self._of_the_ring(parameters)

    def _of_the_choices(self, parameters: Parameters) -> Iterator[str]:
        if parameters.partners < max(self.partners, 1):
            yield f"the session's partners is {parameters.partners}, and this client's policy needs {self.partners}"
        if self.corrupt and not self.partners:
            yield "the policy expects corrupt holders but sets no partners: set partners as `choose` computes it"
        clients, colluding = len(parameters.clients), max(self.colluding, self.corrupt)
        if 2 * parameters.survivors <= clients + colluding:
            yield (
                f"the session releases sums of {parameters.survivors}, and with {colluding} corrupt of {clients} two lists of "
                f"survivors could be signed: raise survivors to at least {(clients + colluding) // 2 + 1}"
            )

    def _of_the_ring(self, parameters: Parameters) -> Iterator[str]:
        if self.corrupt and not self.window:
            yield (
                f"the policy expects {self.corrupt} corrupt holders but none in a window of the ring: set window, "
                f"to {self.corrupt} if in doubt"
            )
        if self.window >= parameters.neighbours // 2:
            yield (
                f"the policy allows {self.window} corrupt in {parameters.neighbours // 2} consecutive places of the ring, "
                "which could cut it anywhere: raise neighbours"
            )

    def _of_the_identities(self, parameters: Parameters) -> Iterator[str]:
        if not parameters.active:
            if self.active:
                yield "the session is passive, and this client's policy needs an active session"
            return
        if registry_digest(self.identities, parameters.clients) != parameters.registry:
            yield "the session's identities differ from those registered at this client"
