"""A function of the user's own as local training, in place of secure-fed's steps: any trainer of torch modules.

    loss = function(model, examples, round)

**Guarantee.** The change of a client's trained tensors is a function of the global state, the client's examples, the round and
the client's random numbers, and of nothing that another client's call left in the model or in the global generators of Python,
NumPy and torch. With it, a guarantee for clients needs nothing more of the function than the clipping and the noise of every
contribution. For this:

- Every call gets a model of its own: a copy with the round's tensors in place, in training mode. Modules, buffers, hooks,
  attributes and configuration are copied, and the copy is dropped after the call, with everything that the function did to it.
- Frozen weights are in memory once. The copy has parameters of its own over the same storage, so only a write into the
  storage could reach another client. Checksums find it (`objective.checksums`), and no later call is made.
- The global generators are seeded from the client's random numbers, and restored after the call.

Nobody can see what a function keeps elsewhere, in a global variable or in a file: it must keep nothing of a client's examples
for another client.

What comes back is the change that the function made to the trained tensors. In a model of a narrower dtype these are rounded
before the call, and the rounding is no part of the change.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.errors import ModelError, OwnLoopError
from secure_fed.learning.training.local import Job, Train, Trained, seeded, train
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Tensors

_MARK = "_hf_peft_config_loaded"  # transformers' own, as `add_adapter` sets it
LocalFunction = Callable[[nn.Module, Sequence[Any], int], float | None]


def trainer_of(local: LocalFunction | None) -> Train:
    """Local training by the user's function, or by secure-fed's steps if there is none."""
    return train if local is None else ByFunction(local)


class ByFunction:
    """Local training by a user's function, as `local.train`."""

    def __init__(self, function: LocalFunction) -> None:
        self._function = function
        self._spoilt = ""  # the frozen weight that a call has changed for all clients

    def __call__(self, objective: Objective, job: Job) -> Trained:
        """The trained tensors, and the loss that the function returns.

        OwnLoopError if the model that the function leaves lacks a parameter, has another one that trains, or has other frozen
        weights, or if the function returns anything but a float or None. A client without examples trains nothing.
        """
        if self._spoilt:
            raise _changed(self._spoilt)
        if not len(job.examples):
            return Trained(job.before.select(job.trainable), math.nan)
        objective.note_parameters()
        model = _copy(objective, job)
        given = dict(model.named_parameters())
        start = {name: _value(given[name]) for name in job.before}
        try:
            with _generators(objective.device, job.rng), torch.enable_grad():
                loss = self._function(model, job.examples, job.round + 1)
        finally:
            self._spoilt = next(iter(objective.changed_parameters()), "")
        if self._spoilt:
            raise _changed(self._spoilt)
        left = _left(model, given)
        # Parameters that do not train keep their values in the model that the function left, and all keep their shapes.
        for name, shared in objective.model.named_parameters():
            now, before = left[name].detach(), start.get(name, shared.detach())
            if now.shape != before.shape or (name not in job.trainable and not _same(now, before)):
                raise _changed(name)
        if not isinstance(loss, float | None):
            raise OwnLoopError(f"local returned a {type(loss).__name__}; return the loss as a float, or None")
        moved = ((name, job.before.tensor(name) + (_value(left[name]) - start[name])) for name in job.trainable)
        return Trained(Tensors(moved), math.nan if loss is None else loss)


def _copy(objective: Objective, job: Job) -> nn.Module:
    """The model with the job's tensors in place, in training mode; only the storage of frozen weights is the objective's.

    A transformers model with PEFT's layers is marked as one that has adapters. Otherwise the Trainer of transformers refuses it
    on a quantised base, and writes all of it into its checkpoints.
    """
    objective.begin()

    def own(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name in job.before:
            value = job.before.tensor(name).to(parameter.device, parameter.dtype, copy=True)
            return nn.Parameter(value.contiguous(), requires_grad=name in job.trainable)
        if type(parameter) is not nn.Parameter:  # quantised, with a state of its own beside the storage
            return parameter
        return nn.Parameter(parameter.detach(), requires_grad=False)

    model, memo = objective.model, {id(one): own(name, one) for name, one in objective.model.named_parameters()}
    try:
        made = copy.deepcopy(model, dict[int, Any](memo))
    except (TypeError, RuntimeError, copy.Error) as error:
        raise ModelError(
            f"local trains a copy of the model for each client, and this {type(model).__name__} cannot be copied ({error}); "
            "give a model that copy.deepcopy can copy"
        ) from error
    if hasattr(made, _MARK) and hasattr(made, "peft_config"):
        setattr(made, _MARK, True)
    return made


def _left(model: nn.Module, given: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters of the model after the call. OwnLoopError unless they are the very objects that were `given`.

    Further ones, such as those of a reference model, may be there if they do not train.
    """
    left = dict(model.named_parameters())
    for name, one in given.items():
        if left.get(name) is not one:
            what = "put another parameter in place of" if name in left else "took out"
            raise OwnLoopError(
                f"local {what} the model's {name}, so its change cannot be read; train the parameters that have requires_grad, "
                "without a peft_config of your own"
            )
    if more := [name for name, one in left.items() if name not in given and one.requires_grad]:
        raise OwnLoopError(
            f"local put the parameter {more[0]} into the model and trained it, and only the method's tensors are sent; train "
            "the parameters that have requires_grad, without a peft_config of your own"
        )
    return left


def _same(now: Tensor, before: Tensor) -> bool:
    places = [(one.data_ptr(), one.dtype, one.stride()) for one in (now, before)]
    if places[0] == places[1]:  # its storage is checked by checksums
        return True
    return torch.equal(now.to(before.device, before.dtype), before)


def _changed(name: str) -> OwnLoopError:
    return OwnLoopError(
        f"local changed {name}, which is frozen, or its shape; train only the parameters that have requires_grad, in their own "
        "shape and dtype, and make the federation anew"
    )


def _value(parameter: Tensor) -> Tensor:
    """A copy of its value, float32 on the CPU."""
    return parameter.detach().to("cpu", torch.float32, copy=True)


@contextmanager
def _generators(device: torch.device, rng: np.random.Generator) -> Iterator[None]:
    """Within the block the global generators of Python, NumPy and torch depend on `rng` alone; afterwards they are restored."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(int(rng.integers(2**63)))
    np.random.seed(int(rng.integers(2**32)))
    try:
        with seeded(device, rng):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
