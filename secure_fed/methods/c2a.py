"""C2A: a hypernetwork makes each client's adapters from its class shares and its texts.

Kim, Kim, Mok, Park and Lee, "Client-Customized Adaptation for Parameter-Efficient Federated Learning" (Findings of ACL 2023),
sections 3.1 to 3.5: adapters by eq. (2), embeddings by eq. (3) and (4), the network by eq. (5) and (6); see
`adapters/hypernetwork.py`. Clients train and send the network with its embedding layers and layer embeddings, and the head.

While a client trains, the paper makes its adapters from the client's class shares and from the largest context of a batch. A
prediction has neither: it uses uniform shares, and the text's own context, so that it does not depend on other texts. Under a
strong skew the shares nearly determine the label, and a network that trains with them learns to copy it from them
(docs/methods.md). So by default training uses the same inputs as a prediction, and two settings restore the paper's:

    method.class_shares = "client"    a client's own shares, in its own copy of the model while it trains and nowhere else
    method.context = "batch"          the largest context of a batch, coordinate by coordinate, as eq. (4) has it

A client's own shares are never sent. Differential privacy covers them like the rest of its training data, since they reach
the server only through its clipped and noised contribution. Either setting couples examples, so then privacy can protect only
clients, and neither examples nor persons.

Deviations: eq. (3) uses the class shares of each batch, as estimates of the client's; here they are the shares of all the
client's examples. Where the labels are no class numbers (tags of tokens, texts to continue) they are uniform. The context of
an adapter is computed from its input, and the two adapters of a layer share its layer embedding. A model that generates text
has no context embedding but its bias.

Counts: on DistilBERT with the 20 classes of 20Newsgroup 63 712 numbers beside the head, 0.097 % of 66M as printed. With the 10
of XGLUE-NC 63 632, 0.047 % of its 134M, where 0.049 % is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.hypernetwork import SHARES, Hypernetworks, shares
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card, State
from secure_fed.tensors.tensors import Tensors

_COUPLED = (
    "the adapter of each example depends on the labels of all, or on the texts of its batch; set method.class_shares = "
    "'uniform' and method.context = 'text'"
)

CARD = Card(
    name="c2a",
    paper="Kim et al., Findings of ACL 2023",
    travels="hypernetwork, its embedding layers, layer embeddings, head",
    mean_exact=False,
    options=("context_dim", "bottleneck", "hyper_dim", "context", "class_shares"),
    lr=1.5e-2,
    head_factor=1.0,
)
COUPLING = replace(CARD, units=("client",), refusals={"example": _COUPLED, "person": _COUPLED})


def build(run: RunConfig) -> C2a:
    method = run.method
    of_batch, own = method.context == "batch", method.class_shares == "client"
    made = Hypernetworks(method.context_dim, method.bottleneck or 16, method.hyper_dim, of_batch)
    return C2a(made, COUPLING if of_batch or own else CARD, own_shares=own)


@dataclass(frozen=True)
class C2a(Averaged):
    """Averages the network and the head. Class shares stay uniform in the state; a client's own shares stay on the client."""

    own_shares: bool = False

    def trained(self, state: State) -> Tensors:
        return state.tensors.without([SHARES])

    def context(self, initial: Tensors, examples: Sequence[Any]) -> Tensors:
        """The client's class shares, if its adapters are made from them."""
        if not self.own_shares:
            return Tensors()
        labels = [_label(examples[i]) for i in range(len(examples))]
        return Tensors({SHARES: shares(labels, len(initial.tensor(SHARES)))})


def _label(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return None
    return item.get("labels", item.get("label"))
