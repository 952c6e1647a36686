"""A frozen encoder that reads each text once.

Where the head of a classifier on the mean over tokens (`mean_pooled`) is all that trains,

    scores = W m + b

the mean m of a text is the same in every step. So it is computed when the text is first seen, in evaluation mode, and kept in
memory; from then on the text costs a product with W. The encoder drops nothing out.

Guarantee: m is, to the bit, a function of the text, the model and the number of torch's threads, whatever was read before it or
with it. A text is padded to a public width that its own length decides (`kinds`), in a pass of a size for which a trial on
made-up texts found every text's m to be the same to the bit, in other company and in other rows. Where no two texts can share a
pass so, each has its own.

What is kept is thrown away when the encoder's weights change. An encoder that trains, or a batch that holds more than texts
padded on the right, is computed as if nothing were kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.models.architecture import is_pooled, of_text
from secure_fed.learning.training.cohort_packs import next_size
from secure_fed.learning.training.gradient_trial import sizes_that_agree
from secure_fed.learning.training.kinds import Kinds, Padded, padded
from secure_fed.learning.training.made_up import made_up
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.supported import mixes_experts
from secure_fed.learning.training.uncoupled import most_at_once


def read_once(objective: Objective) -> None:
    """Let a model whose head reads the mean over tokens keep the means, if its encoder is frozen."""
    model: Any = objective.model
    if is_pooled(getattr(model, "config", None)) and not _trains(model.encoder):
        model.read = ReadOnce(model, objective.longest)
        objective.reads_once = True


Key = tuple[int, int, bytes]


class Text(NamedTuple):
    """The tokens of one text, without padding, and which of a pair each belongs to, where the model is told."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64] | None

    @property
    def key(self) -> Key:
        """Equal for equal texts that are read by as many threads."""
        types = b"" if self.types is None else self.types.tobytes()
        digest = hashlib.blake2b(self.ids.tobytes() + types, digest_size=16).digest()
        return torch.get_num_threads(), len(self.ids), digest


@dataclass
class Kept:
    """What is kept: the mean of each text, and the sizes of the passes of each kind. weights: those that it was made by."""

    weights: tuple[Any, ...] = ()
    means: dict[Key, Tensor] = field(default_factory=dict)
    sizes: dict[tuple[int, Padded], tuple[int, ...]] = field(default_factory=dict)

    def begin(self, weights: tuple[Any, ...]) -> None:
        """Forget everything that other weights made."""
        if weights != self.weights:
            self.weights, self.means, self.sizes = weights, {}, {}


class ReadOnce:
    """The model's `read`, which computes the mean of a text once. Copies of the model with the very same weights share it."""

    def __init__(self, model: Any, longest: int | None) -> None:
        self._model, self._longest, self._kept = model, longest, Kept()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadOnce:
        own = ReadOnce(memo[id(self._model)], self._longest)
        if all(memo.get(id(weight)) is weight for weight in self._model.encoder.parameters()):
            own._kept = self._kept
        return own

    def __call__(self, **inputs: Any) -> tuple[Tensor, Any]:
        """(B, d) means of the texts, and nothing of what the base model gives beside."""
        texts = self._texts(inputs)
        if texts is None:
            computed: tuple[Tensor, Any] = type(self._model).read(self._model, **inputs)
            return computed
        with torch.no_grad(), torch._C.DisableTorchFunction():  # of the passes that small products are made apart for
            return self._means(texts), {}

    def _texts(self, inputs: dict[str, Any]) -> list[Text] | None:
        """The texts of a batch, or None if there is more in it, or if the encoder trains."""
        given = {name: _numbers(value) for name, value in inputs.items() if value is not None and name in _READ}
        more = any(value is not None for name, value in inputs.items() if name not in _READ)
        if more or _READ[0] not in given or _trains(self._model.encoder):
            return None
        ids, mask, types = given[_READ[0]], given.get(_READ[1]), given.get(_READ[2])
        counts = np.full(len(ids), ids.shape[1]) if mask is None else mask.sum(1)
        if mask is not None and not np.array_equal(mask, np.arange(ids.shape[1]) < counts[:, None]):
            return None
        return [
            Text(ids[row, :count], None if types is None else types[row, :count]) for row, count in enumerate(counts)
        ]

    def _means(self, texts: Sequence[Text]) -> Tensor:
        kept, keys = self._kept, [text.key for text in texts]
        kept.begin(tuple((weight.data_ptr(), weight._version) for weight in self._model.encoder.parameters()))
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in kept.means}
        read = self._read(list(new.values())) if new else []
        found = dict(zip(new, read, strict=True))
        means = torch.stack([found[key] if key in found else kept.means[key] for key in keys])
        if read and (len(kept.means) + len(read)) * read[0].nbytes <= _MOST:
            kept.means |= found
        return means

    def _read(self, texts: list[Text]) -> list[Tensor]:
        """(d,) of each text, in passes of public shapes."""
        found: dict[int, Tensor] = {}
        for kind, places in places_of(padded(len(text.ids), self._longest) for text in texts).items():
            sizes, at = self._sizes(kind, texts[places[0]]), 0
            while at < len(places):
                some = places[at : at + next_size(sizes, len(places) - at, kind.width)]
                size = next(size for size in sizes if size >= len(some))
                filled = [texts[place] for place in some] + [texts[some[0]]] * (size - len(some))
                found |= zip(some, self._pass(kind.width, filled)[: len(some)].clone(), strict=True)
                at += len(some)
        return [found[place] for place in range(len(texts))]

    def _sizes(self, kind: Padded, like: Text) -> tuple[int, ...]:
        """The sizes of passes of a kind, ascending, tried out the first time. like: a text, of which nothing counts but whether
        it has types."""
        key = torch.get_num_threads(), kind
        if key not in self._kept.sizes:
            most = most_at_once(next(self._model.encoder.parameters()).device)
            names = ("input_ids", "token_type_ids")[: 1 if like.types is None else 2]
            made = made_up(Kinds(list, self._longest), kind, self._model, dict.fromkeys(names), most) or ()
            probe = [Text(item["input_ids"], item.get("token_type_ids")) for item in made]
            tries = [1, most] if probe and not mixes_experts(self._model) else []
            found = sizes_that_agree(lambda texts: {"mean": self._pass(kind.width, texts)}, probe, tries)
            self._kept.sizes[key] = found or (1,)
        return self._kept.sizes[key]

    def _pass(self, width: int, texts: Sequence[Text]) -> Tensor:
        """(B, d) of texts that are padded to this width."""
        encoder, shape = self._model.encoder, (len(texts), width)
        ids = np.full(shape, of_text(encoder.config).pad_token_id or 0)
        mask, types = np.zeros(shape, int), np.zeros(shape, int)
        for row, text in enumerate(texts):
            ids[row, : len(text.ids)], mask[row, : len(text.ids)] = text.ids, 1
            if text.types is not None:
                types[row, : len(text.ids)] = text.types
        inputs = {"input_ids": ids, "attention_mask": mask} | (
            {} if texts[0].types is None else {"token_type_ids": types}
        )
        device, training = next(encoder.parameters()).device, encoder.training
        encoder.eval()
        try:
            given = {name: torch.from_numpy(value).to(device) for name, value in inputs.items()}
            mean: Tensor = type(self._model).read(self._model, **given)[0]
            return mean
        finally:
            encoder.train(training)


def _trains(encoder: nn.Module) -> bool:
    return any(weight.requires_grad for weight in encoder.parameters())


def _numbers(tensor: Tensor) -> NDArray[np.int64]:
    found: NDArray[np.int64] = tensor.cpu().numpy().astype(np.int64)
    return found


_READ = ("input_ids", "attention_mask", "token_type_ids")
_MOST = 2**30  # bytes of means
