"""The hidden layer of a classifier's head, p = softmax(V tanh(W x + b) + c): the tensors that a lying server crafts.

It is trained and sent with every adapter, LoRA included, so these attacks do not depend on the adapter. x (d,) is the model's
representation of a text before the head. One gradient step moves row i of W along sum_e delta_ei (1 - h_ei^2) x_e and b_i along
the same sum without x_e (delta_e = V^T (p_e - y_e)), and V along sum_e (p_e - y_e) h_e^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attacks.adversary.active import LyingServer
from attacks.adversary.case import Inapplicable
from secure_fed.learning.training.objective import to_device
from secure_fed.methods.method import State
from secure_fed.tensors.tensors import Tensors

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
        initial, sent = server.honest, _sent(server)
        names = [name for name in server.assembly.problem.head if name in sent]
        weights = [name for name in names if name.endswith("weight") and initial[name].shape[1:]]
        pairs = [(one, two) for one in weights for two in weights if one != two and _chained(initial, one, two)]
        for inner, outer in pairs:
            hidden, width = initial[inner].shape
            head = cls(inner[: -len(".weight")], outer[: -len(".weight")], width, hidden, initial[outer].shape[0])
            if f"{head.inner}.bias" in sent and f"{head.outer}.bias" in sent and head.holds(server, example):
                return head
        raise Inapplicable(_NO_HEAD)

    def tensors(self, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensors:
        """The head's four tensors by their names."""
        return Tensors(
            {
                f"{self.inner}.weight": w.float().contiguous(),
                f"{self.inner}.bias": b.float().contiguous(),
                f"{self.outer}.weight": v.float().contiguous(),
                f"{self.outer}.bias": c.float().contiguous(),
            }
        )

    def changes(self, update: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The update of W (h, d), b (h,), V (classes, h) and c (classes,), in float64."""
        names = (f"{self.inner}.weight", f"{self.inner}.bias", f"{self.outer}.weight", f"{self.outer}.bias")
        w, b, v, c = (update.tensor(name).double() for name in names)
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
        w, b = (server.honest.tensor(f"{self.inner}.{end}").double() for end in ("weight", "bias"))
        v, c = (server.honest.tensor(f"{self.outer}.{end}").double() for end in ("weight", "bias"))
        if x.shape != (1, self.width) or outputs.shape != (1, self.classes):
            return False
        return bool(torch.allclose((x @ w.T + b).tanh() @ v.T + c, outputs, atol=1e-3))

    def _captured(self, server: LyingServer, examples: list[Any]) -> tuple[Tensor, Tensor]:
        """The inputs of the hidden layer, and the outputs of the last layer."""
        objective = server.assembly.objective
        model: nn.Module = objective.load(server.honest).eval()
        caught: dict[str, Tensor] = {}
        hooks = [
            model.get_submodule(self.inner).register_forward_pre_hook(
                lambda module, given: caught.__setitem__("x", given[0].detach().double().cpu())
            ),
            model.get_submodule(self.outer).register_forward_hook(
                lambda module, given, out: caught.__setitem__("out", out.detach().double().cpu())
            ),
        ]
        try:
            with torch.no_grad():
                objective.loss(model, to_device(server.assembly.problem.collate(examples), objective.device))
        finally:
            for hook in hooks:
                hook.remove()
            model.train()
        return caught["x"], caught["out"]


def _chained(initial: Tensors, inner: str, outer: str) -> bool:
    return initial[inner].shape[0] == initial[outer].shape[1]


def _sent(server: LyingServer) -> set[str]:
    """The names of the tensors that clients train and send in the round: neither frozen nor personal."""
    assembly = server.assembly
    plan = assembly.method.plan(State(server.honest, round=server.round))
    return set(plan.trainable) & set(server.honest) - set(assembly.server.personal)
