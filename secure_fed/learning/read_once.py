"""A frozen encoder that reads each text once.

If only the linear head of a classifier on the mean over tokens trains (`mean_pooled`),

    scores = W m + b

the mean m of a text is the same in every step. So it is computed when the text is first seen, in evaluation mode, and kept in
memory; from then on the text costs a product with W. The encoder has no dropout then.

Guarantee: m is bit for bit a function of the text, the model and the number of torch's threads, whatever texts are read before
it or with it. A text is padded to a public width that its own length determines (`pass_shapes`), in a pass of a size for which
a trial on made-up texts found every text's m bit-identical beside other texts and in other rows. If no two texts can share a
pass in this way, each has its own.

The kept means belong to the objective, and the model uses them only while the objective computes (`Objective.reading`): the
model itself, if passed on, contains no means of texts.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from secure_fed.learning.data.rows import places_of
from secure_fed.learning.models.architecture import couples_examples, is_pooled, of_text
from secure_fed.learning.models.devices import device_of
from secure_fed.learning.training.common_passes.packing import Room, next_size
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.pass_shapes import Kinds, Padded, agreeing_sizes
from secure_fed.learning.training.trials import made_up

Numbers = NDArray[np.int64]
Key = tuple[int, int, bytes]


def read_once(objective: Objective, names: Collection[str], most: int | None = None) -> None:
    """Make the objective keep the means, if its model's head reads them and only the head ever changes.

    names: the names of all tensors of the run's states. most: the most texts in a pass; None for what suits the device.
    """
    if is_pooled(getattr(objective.model, "config", None)) and all(name.startswith(_HEAD) for name in names):
        objective.reading = ReadOnce(objective.model, objective.longest, most)


class Text(NamedTuple):
    """The tokens of one text up to its last unmasked token, and their mask. types: each token's part of a pair."""

    ids: Numbers
    mask: Numbers
    types: Numbers | None

    @property
    def key(self) -> Key:
        """Equal for equal texts that are read with the same number of threads."""
        told = b"".join(part.tobytes() for part in self if part is not None)
        return torch.get_num_threads(), len(self.ids), hashlib.blake2b(told, digest_size=16).digest()


@dataclass
class Kept:
    """The kept means of texts, and the pass sizes of each kind. weights: the weights from which they were computed."""

    weights: tuple[Any, ...] = ()
    means: dict[Key, Tensor] = field(default_factory=dict)
    sizes: dict[tuple[int, Padded, bool], tuple[int, ...]] = field(default_factory=dict)

    def begin(self, weights: tuple[Any, ...]) -> None:
        """Forget everything if the weights have changed."""
        if weights != self.weights:
            self.weights, self.means, self.sizes = weights, {}, {}

    def add(self, means: dict[Key, Tensor]) -> None:
        """Keep these too, while there is room."""
        count = len(self.means) + len(means)
        if means and count * (next(iter(means.values())).nbytes + _BESIDE) <= _MOST:
            self.means |= means


class ReadOnce(AbstractContextManager[None]):
    """The model's `read` within the block, which computes the mean of a text once.

    Copies of the model that share its weights also share the kept means.
    """

    def __init__(self, model: Any, longest: int | None, most: int | None) -> None:
        self._model, self._longest, self._most, self._kept = model, longest, most, Kept()

    @property
    def _device(self) -> torch.device:
        return device_of(self._model)

    @property
    def _kinds(self) -> Kinds:
        return Kinds(list, self._longest, apart=8 if self._device.type == "cpu" else 32)

    def __enter__(self) -> None:
        vars(self._model)["read"] = self

    def __exit__(self, *_: object) -> None:
        vars(self._model).pop("read", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadOnce:
        own = ReadOnce(copy.deepcopy(self._model, memo), self._longest, self._most)
        if all(memo.get(id(weight)) is weight for weight in self._model.encoder.parameters()):
            own._kept = self._kept
        return own

    def __call__(self, **inputs: Any) -> tuple[Tensor, Any]:
        """(B, d) means of the texts, without the base model's other outputs."""
        given = {name: value for name, value in inputs.items() if value is not None}
        shapes_alone = self._device.type == "meta"  # of a dry run
        if shapes_alone or not {"input_ids"} <= given.keys() <= set(_READ):
            return self._computed(inputs)
        with torch.no_grad(), torch._C.DisableTorchFunction():  # also switches off `SmallProductsApart`
            return self._means(_texts(**{name: _numbers(value) for name, value in given.items()})), {}

    def _means(self, texts: Sequence[Text]) -> Tensor:
        kept, keys = self._kept, [text.key for text in texts]
        kept.begin(tuple((weight.data_ptr(), weight._version) for weight in self._model.encoder.parameters()))
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in kept.means}
        found = dict(zip(new, self._read(list(new.values())), strict=True))
        means = torch.stack([found[key] if key in found else kept.means[key] for key in keys])
        kept.add(found)
        return means

    def _read(self, texts: list[Text]) -> list[Tensor]:
        """The mean (d,) of each text, computed in passes of public shapes."""
        found: dict[int, Tensor] = {}
        kinds = self._kinds
        of = (kinds.padded(len(text.ids), shown=bool(text.mask.all())) for text in texts)
        for kind, places in places_of(of).items():
            sizes, at = self._sizes(kind, typed=texts[places[0]].types is not None), 0
            while at < len(places):
                some = places[at : at + next_size(sizes, len(places) - at, kind.width)]
                size = next(size for size in sizes if size >= len(some))
                filled = [texts[place] for place in some] + [texts[some[0]]] * (size - len(some))
                found |= zip(some, self._pass(kind.width, filled)[: len(some)].clone(), strict=True)
                at += len(some)
        return [found[place] for place in range(len(texts))]

    def _sizes(self, kind: Padded, *, typed: bool) -> tuple[int, ...]:
        """The pass sizes of a kind, ascending, from a comparison at their first use. typed: whether texts have types."""
        key = torch.get_num_threads(), kind, typed
        if key not in self._kept.sizes:
            names = ("input_ids", "attention_mask", "token_type_ids")[: 2 + typed]
            room = Room.of(self._device, self._model, 1, public=True).of_width(kind.width)
            most = min(self._most or room, _ROWS) if self._device.type == "cpu" else self._most or room
            made = made_up(self._kinds, kind, self._model, dict.fromkeys(names), most)
            probe = [Text(item["input_ids"], item["attention_mask"], item.get("token_type_ids")) for item in made]
            tries = ((1, most) if self._device.type == "cpu" else (most,)) if probe and most > 1 else ()
            found = agreeing_sizes(
                lambda texts: [self._pass(kind.width, texts).float()],
                probe,
                () if couples_examples(self._model) else tries,
            )
            self._kept.sizes[key] = found or (1,)
        return self._kept.sizes[key]

    def _pass(self, width: int, texts: Sequence[Text]) -> Tensor:
        """The means (B, d) of texts that are padded to this width."""
        encoder, shape = self._model.encoder, (len(texts), width)
        blank = of_text(encoder.config).pad_token_id or 0
        columns = {name: np.full(shape, blank if name == "input_ids" else 0, np.int64) for name in _READ}
        for row, text in enumerate(texts):
            for column, part in zip(columns.values(), text, strict=True):
                if part is not None:
                    column[row, : len(part)] = part
        if texts[0].types is None:
            del columns["token_type_ids"]
        return self._computed({name: torch.from_numpy(column).to(self._device) for name, column in columns.items()})[0]

    def _computed(self, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The model's own `read` without kept means, in evaluation mode."""
        encoder = self._model.encoder
        training = encoder.training
        encoder.eval()
        try:
            found: tuple[Tensor, Any] = type(self._model).read(self._model, **inputs)
            return found
        finally:
            encoder.train(training)


def _texts(
    input_ids: Numbers, attention_mask: Numbers | None = None, token_type_ids: Numbers | None = None
) -> list[Text]:
    """The rows of a batch without the padding behind them."""
    mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
    ends = [int(row.nonzero()[0][-1]) + 1 if row.any() else 0 for row in mask]
    return [
        Text(input_ids[row, :end], mask[row, :end], None if token_type_ids is None else token_type_ids[row, :end])
        for row, end in enumerate(ends)
    ]


def _numbers(tensor: Tensor) -> Numbers:
    found: Numbers = tensor.cpu().numpy().astype(np.int64)
    return found


_HEAD = "classifier."
_READ = ("input_ids", "attention_mask", "token_type_ids")
_ROWS = 8  # on a CPU, larger passes take no less time per text
_MOST, _BESIDE = 2**30, 1024  # bytes: of all means, and the overhead of each mean
