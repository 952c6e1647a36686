"""The lies: tensors for a classifier's head that make a client's update tell of its texts, and what is read from the answer.

The head is p = softmax(V tanh(W x + b) + c). It is trained and sent with every adapter, LoRA included, so these attacks do not
depend on the adapter. x (d,) is the model's representation of a text before the head. One gradient step moves row i of W along
sum_e delta_ei (1 - h_ei^2) x_e and b_i along the same sum without x_e (delta_e = V^T (p_e - y_e)), and V along the sum over e
of (p_e - y_e) h_e^T.

traps      units that isolate single examples of a batch; `named` reads the texts that they caught
alarm      units that fire for one text alone; `score` and `is_member` read whether it was there
dead       no gradient, for the other clients of a sum; `moved` measures it
flat       hidden units that are nearly 0; `counts` reads the numbers of labels
has_text   compares an answer with repetitions of the client's training, with a text and without it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attacks.adversary.case import Inapplicable
from attacks.adversary.lying_server import LyingServer
from secure_fed.learning.training.objective import to_device
from secure_fed.methods.method import State
from secure_fed.tensors.tensors import Layout, Tensors

_NO_HEAD = (
    "the attack needs a classifier's head with a hidden layer and tanh, such as BERT's pooler, whose tensors all travel, and "
    "there is none"
)


@dataclass(frozen=True)
class Head:
    """inner, outer: names of W and V without their endings. width: d. hidden: number of units. classes: number of outputs."""

    inner: str
    outer: str
    width: int
    hidden: int
    classes: int

    @classmethod
    def of(cls, server: LyingServer, example: Any) -> Head:
        """The head of the federation's model, after a check on an example that it computes the assumed formula."""
        initial, assembly = server.honest, server.assembly
        trainable = assembly.method.plan(State(initial, round=server.round)).trainable
        sent = set(trainable) & set(initial) - set(assembly.server.personal)  # neither frozen nor personal
        names = [name for name in server.assembly.problem.head if name in sent]
        weights = [name for name in names if name.endswith("weight") and initial[name].shape[1:]]
        pairs = [
            (one, two)
            for one in weights
            for two in weights
            if one != two and initial[one].shape[0] == initial[two].shape[1]
        ]
        for inner, outer in pairs:
            hidden, width = initial[inner].shape
            head = cls(inner[: -len(".weight")], outer[: -len(".weight")], width, hidden, initial[outer].shape[0])
            if sent.issuperset(head.names) and head.holds(server, example):
                return head
        raise Inapplicable(_NO_HEAD)

    @property
    def names(self) -> list[str]:
        """The names of W, b, V and c."""
        return [f"{layer}.{part}" for layer in (self.inner, self.outer) for part in ("weight", "bias")]

    def tensors(self, *given: Tensor) -> Tensors:
        """The head's four tensors W, b, V and c by their names."""
        return Tensors((name, part.float().contiguous()) for name, part in zip(self.names, given, strict=True))

    def changes(self, update: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The part of an update, or of a state, for W (h, d), b (h,), V (classes, h) and c (classes,), in float64."""
        w, b, v, c = (update.tensor(name).double() for name in self.names)
        return w, b, v, c

    def inputs(self, server: LyingServer, examples: Sequence[Any]) -> Tensor:
        """(n, d) the input x of each example, in float64, under the adapter that the server sends."""
        return torch.cat(
            [self._captured(server, list(examples[at : at + 64]))[0] for at in range(0, len(examples), 64)]
        )

    def holds(self, server: LyingServer, example: Any) -> bool:
        """Whether the model's outputs are V tanh(W x + b) + c."""
        try:
            x, outputs = self._captured(server, [example])
        except (KeyError, AttributeError, TypeError, RuntimeError):
            return False
        w, b, v, c = self.changes(server.honest)
        if x.shape != (1, self.width) or outputs.shape != (1, self.classes):
            return False
        return bool(torch.allclose((x @ w.T + b).tanh() @ v.T + c, outputs, atol=1e-3))

    def _captured(self, server: LyingServer, examples: list[Any]) -> tuple[Tensor, Tensor]:
        """The inputs of the hidden layer, and the outputs of the last layer."""
        objective = server.assembly.objective
        model: nn.Module = objective.load(server.honest).eval()
        inner, outer = model.get_submodule(self.inner), model.get_submodule(self.outer)
        caught: dict[str, Tensor] = {}

        def keep(name: str, value: Tensor) -> None:
            caught[name] = value.detach().double().cpu()

        before = inner.register_forward_pre_hook(lambda module, given: keep("x", given[0]))
        behind = outer.register_forward_hook(lambda module, given, out: keep("out", out))
        try:
            with before, behind, torch.no_grad():
                objective.loss(model, to_device(server.assembly.problem.collate(examples), objective.device))
        finally:
            model.train()
        return caught["x"], caught["out"]


_NARROW = 3.0  # windows to a bin
_LOUDEST = 4.0  # the largest joint output of all traps


def traps(head: Head, public: Tensor, limit: float, seed: int = 0) -> Tensors:
    """The tensors of a head whose units are traps. public: (n, d) inputs of public texts. limit: the largest value allowed.

    After Fowl et al. 2022 (Robbing the Fed: bins of one linear measurement) and 2023 (Decepticons: the same for transformers),
    Boenisch et al. 2023 (trap weights, Algorithm 1), Zhao et al. 2024 (LoKI: the same behind a sum), and Shi et al. 2026
    (NeuroImprint: one unit a text, in adapters and under AdamW). Deviations: their differences of neighbouring ReLU bins are
    windows of tanh here, because a head has tanh; a text is identified among candidates, not decoded.

    Unit i is tanh(s_i (u x - q_i)), u a direction common to all units and q_i the quantiles of u x over public texts. It moves
    only for texts whose u x is within about 1 / s_i of q_i. If this holds for one text x of the batch, row i moves along x:
    exactly under SGD, along the signs of x under AdamW, whose steps keep signs and lose sizes. All columns of V are equal, so
    no unit's delta is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(head.width, generator=generator, dtype=torch.float64)
    u /= u.norm()
    along = (public @ u).sort().values
    at = (torch.arange(head.hidden, dtype=torch.float64) + 0.5) / head.hidden
    q = torch.quantile(along, at)
    bins = torch.gradient(torch.quantile(along, torch.linspace(0, 1, head.hidden + 2, dtype=torch.float64)))[0][1:-1]
    slopes = _NARROW / bins.clamp_min(1e-4)
    slopes = slopes.clamp_max(min(limit / float(u.abs().max()), limit / float(q.abs().max())) * 0.999)
    v = torch.randn(head.classes, generator=generator, dtype=torch.float64)
    v *= _LOUDEST / head.hidden / v.abs().max()
    outer = v[:, None].expand(-1, head.hidden)
    return head.tensors(slopes[:, None] * u, -slopes * q, outer, torch.zeros(head.classes))


def named(head: Head, update: Tensors, candidates: Tensor, most: int, *, signs: bool) -> list[int]:
    """Indices of the `most` candidates (m, d) closest in direction to rows of the update, the closest first.

    signs: the update is of AdamW, so a row is compared with the signs of a candidate.
    """
    w, b, _, _ = head.changes(update)
    rows = w * torch.sign(b)[:, None]
    heard = rows.norm(dim=1) > 0
    if not heard.any():
        return []
    targets = torch.sign(candidates) if signs else candidates
    left, right = (part / part.norm(dim=1, keepdim=True).clamp_min(1e-30) for part in (rows[heard], targets))
    best, which = (left @ right.T).abs().max(dim=1)  # each unit names its nearest candidate
    order = best.argsort(descending=True).tolist()
    return list(dict.fromkeys(int(which[row]) for row in order))[:most]


NULLS = 19
LEVEL = 1 / (NULLS + 1)
_RIDGE = 1e-3
_FLAT = 12.0  # argument of tanh for a public text
_LOUD = 2.0


def alarm(head: Head, target: Tensor, public: Tensor, limit: float) -> Tensors:
    """The tensors of a head that moves for the target (d,) only. public: (n, d). limit: the largest magnitude of a value.

    After Nguyen et al. 2023 (active membership inference, AMI: a unit whose gradient is not 0 if and only if the target is in
    the batch). Deviation: their two ReLU layers are one window of tanh here, along Fisher's direction between the target and
    public texts, so that other texts lie where tanh is flat.
    """
    mean = public.mean(0)
    spread = torch.cov(public.T) + _RIDGE * torch.eye(head.width, dtype=torch.float64)
    u = torch.linalg.solve(spread, target - mean)
    u /= u.norm()
    gap = float(target @ u - (public @ u).quantile(0.99))
    slope = _FLAT / max(gap, 1e-3)
    slope = min(slope, 0.999 * limit / max(float(u.abs().max()), abs(float(target @ u))))
    w, b = (slope * u).expand(head.hidden, -1), torch.full((head.hidden,), -slope * float(target @ u))
    v = torch.full((head.classes, head.hidden), -_LOUD / head.hidden)
    v[0] = _LOUD / head.hidden
    return head.tensors(w, b, v, torch.zeros(head.classes))


def score(head: Head, update: Tensors, target: Tensor) -> float:
    """The squared distance that the units moved along the target, in either direction.

    It is compared with the scores of `NULLS` simulated clients with public texts only: the verdict is "member" if it is above
    all of them. A client without the target, whose texts are like the public ones, gets this verdict with a probability of at
    most 1 / (NULLS + 1).
    """
    w, b, _, _ = head.changes(update)
    return float(torch.cat([w @ target, b]).square().sum())


def is_member(score_: float, nulls: Sequence[float]) -> bool:
    """The verdict, at a false-positive rate of 1 / (len(nulls) + 1)."""
    return score_ > max(nulls)


def dead(head: Head) -> Tensors:
    """The tensors of a head under which every client's gradient is 0 except for the last bias.

    If all clients of a secure sum but one get them, the sum is that client's contribution. After Pasquini et al. 2022 (Eluding
    secure aggregation: gradient suppression by model inconsistency). Deviation: their dead ReLU layer is a head with W = b = V
    = 0 here. Its hidden units are 0 and pass no gradient, so only the last bias moves, and nothing else in the head or in the
    adapter below it.
    """
    w, v = torch.zeros(head.hidden, head.width), torch.zeros(head.classes, head.hidden)
    return head.tensors(w, torch.zeros(head.hidden), v, torch.zeros(head.classes))


def moved(head: Head, update: Tensors) -> float:
    """The largest change of any value except the last bias: 0 for a client that gets `dead`."""
    rest = update.without([f"{head.outer}.bias"])
    return max(float(rest.tensor(name).abs().max()) for name in rest)


EPS = 1e-8  # of torch's AdamW
SMALL = {"adamw": 1e-10, "sgd": 0.5}  # a, by the optimiser


def flat(head: Head, optimizer: str) -> Tensors:
    """The tensors of a head with the same output for every text, and hidden units at a: its step tells the label counts.

    After Wainakh et al. 2022 (LLG: signs and sizes of the last layer's gradient). AdamW's first step is lr g / (|g| + eps),
    whose size is lr unless g is tiny; so the attack `label_counts` does not apply to it. A lying server makes g tiny. With W =
    0, V = 0, c = 0 and b = atanh(a), every hidden unit has the value a for every text, every class has probability 1 / k, and

        g_V[j, i] = a (1 / k - n_j / B),        step = -lr g / (|g| + eps)

    With a far below eps the step is linear in g, and the counts are read exactly. This attack is the project's own; Shi et al.
    2026 (NeuroImprint) avoid the same obstacle by moving each unit once. By the second step of AdamW the hidden layer has
    moved, and the counts are lost.
    """
    b = torch.full((head.hidden,), math.atanh(SMALL[optimizer]), dtype=torch.float64)
    v = torch.zeros(head.classes, head.hidden)
    return head.tensors(torch.zeros(head.hidden, head.width), b, v, torch.zeros(head.classes))


def counts(head: Head, update: Tensors, optimizer: str, lr: float, steps: float, examples: int) -> Tensor:
    """(classes,) integers that sum to `examples`, closest to the update's values.

    steps: the number of steps at rate `lr` with the same total length. Exact for one step; for several steps of SGD an
    approximation that neglects the movement of the last bias.
    """
    _, _, v, _ = head.changes(update)
    step = -v.mean(1) / (lr * steps)
    gradient = step * EPS / (1 - step.abs()).clamp_min(1e-3) if optimizer == "adamw" else step
    shares = 1 / head.classes - gradient / SMALL[optimizer]
    return whole(shares, examples)


def whole(shares: Tensor, examples: int) -> Tensor:
    """Shares as integer counts of `examples`: rounded down, the remaining ones to the largest remainders."""
    wanted = shares.clamp_min(0.0)
    wanted = examples * (wanted / wanted.sum() if wanted.sum() > 0 else torch.full_like(wanted, 1 / len(wanted)))
    low = wanted.floor()
    left = examples - int(low.sum())
    order = (wanted - low).argsort(descending=True)
    low[order[:left]] += 1
    return low.long()


def has_text(answer: Tensors, with_text: Tensors, without: Tensors) -> bool:
    """Whether the client's contribution is closer to the training with the text: the likelihood ratio under Gaussian noise.

    The server repeats a client's local training with and without a text, and answers with the closer of the two: the
    distinguishing game behind differential privacy, played by a server that knows everything except whether the client has the
    text (Nasr et al. 2021, Adversary instantiation: a malicious data set and a white-box federated server). In a run without
    privacy, order and dropout come from its seed, and a replay equals the client's contribution bit for bit. Honest tensors
    suffice; the tensors of `alarm` make the two trainings differ most.

    answer: the client's contribution, or a sum minus the expected contributions of the others. A tie counts as "without".
    """
    layout = Layout.of(without)
    seen, yes, no = (layout.flatten(one.dense(), torch.float64) for one in (answer, with_text, without))
    return bool((seen - no).norm() > (seen - yes).norm())
