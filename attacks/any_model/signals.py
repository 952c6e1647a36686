"""Signals of membership: a number for each text, as published attacks define it. Higher means more likely a member.

The first functions take losses, or the log-likelihoods of tokens, so they work with any model. Two attacks read other texts
too: those after a prefix (`log_likelihoods_after`), and those with one word changed (`neighbour_losses`). A file of the user's
may define a signal of its own (`own_scores`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attacks import lira, rmia
from attacks.adversary.null import Floats
from attacks.any_model.outputs import in_options
from attacks.any_model.subject import Subject, Tokens, plain_of, tokens_of
from attacks.catalogue import executed, guarded, refused
from secure_fed.errors import DataError, ModelError, UsageError
from secure_fed.learning.data import sources
from secure_fed.learning.data.chats import ASSISTANT, Chat
from secure_fed.learning.data.encode import ASIDE, IGNORED, Encoded
from secure_fed.learning.data.rows import Vocabulary
from secure_fed.learning.evaluation import confidence_of_likelihood
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.models.loading import explained, quiet
from secure_fed.learning.models.locate import locate
from secure_fed.learning.tasks.chat import Chats

PAPERS = {
    "loss": "Yeom et al. 2018",
    "loss beside references": "Watson et al. 2022",
    "loss by zlib": "Carlini et al. 2021",
    "Min-K %": "Shi et al. 2024",
    "Min-K %++": "Zhang et al. 2025",
    "ReCaLL": "Xie et al. 2024",
    "neighbourhood": "Mattern et al. 2023",
    "LiRA": "Carlini et al. 2022",
    "RMIA": "Zarifzadeh et al. 2024",
    "LiRA offline": "Carlini et al. 2022",
    "RMIA offline": "Zarifzadeh et al. 2024",
}
SHARE = 0.2  # of a text's tokens, the least likely ones: the middle of the values in the papers on Min-K %


def loss(losses: Floats) -> Floats:
    """-loss(x) (Yeom et al. 2018, section III-B)."""
    return -losses


def calibrated(losses: Floats, references: Sequence[Floats]) -> Floats:
    """The mean loss under the references minus the model's: calibrates for a text's difficulty (Watson et al. 2022, section 3).

    With an adapter's base model as the reference, it is the log-likelihood ratio of Mireshghallah et al. 2022.
    """
    return np.asarray(np.mean(np.stack(references), axis=0) - losses)


def offline(phi: Floats, reference_phi: Floats) -> dict[str, Floats]:
    """(texts,) scores of LiRA (Carlini et al. 2022, equation 4) and RMIA (Zarifzadeh et al. 2024, section 3) without shadows.

    phi: (texts,) the model's confidences. reference_phi: (references, texts) the confidences of two or more models that saw no
    text. RMIA's population is all texts of the audit.
    """
    nobody = np.zeros(reference_phi.shape, dtype=bool)
    given = phi, reference_phi, nobody
    return {
        "LiRA offline": lira.offline(*given),
        "RMIA offline": rmia.scores(*given, phi, reference_phi, a=rmia.UNTUNED_A, marginal=rmia.offline_marginal),
    }


def confident(losses: Floats, *, likely: bool) -> Floats:
    """(texts,) confidences from losses: the logit of exp(-loss) if that is a probability (`likely`), else -loss."""
    return np.asarray(confidence_of_likelihood(torch.from_numpy(-losses)).numpy() if likely else -losses)


def per_zlib(tokens: Sequence[Tokens], texts: Sequence[str]) -> Floats:
    """The log-likelihood divided by the text's size in bytes after zlib (Carlini et al. 2021, section 5.2)."""
    sizes = [len(zlib.compress(text.encode())) for text in texts]
    return np.array([one.said.sum() / size for one, size in zip(tokens, sizes, strict=True)])


def min_k(tokens: Sequence[Tokens], share: float = SHARE) -> Floats:
    """The mean log-likelihood of the least likely tokens, Min-K % (Shi et al. 2024, section 3)."""
    return np.array([_least(one.said, share) for one in tokens])


def min_k_plus(tokens: Sequence[Tokens], share: float = SHARE) -> Floats:
    """The same for log-likelihoods in standard deviations from their mean, Min-K %++ (Zhang et al. 2025, section 4)."""
    return np.array([_least((one.said - one.mean) / np.maximum(one.deviation, 1e-6), share) for one in tokens])


def _least(values: Floats, share: float) -> float:
    """The mean of the smallest `share` of the values, at least one of them; 0 without values."""
    if not len(values):
        return 0.0
    count = max(1, int(len(values) * share))
    return float(np.sort(values)[:count].mean())


def recall(tokens: Sequence[Tokens], conditional: Floats) -> Floats:
    """LL(x | P) / LL(x), ReCaLL (Xie et al. 2024, arXiv 2406.15968, section 3). conditional: (texts,) LL(x | P).

    LL is a text's log-likelihood, and the prefix P consists of some texts of the same kind that were not in the training. The
    prefix lowers the log-likelihood of a memorised text more than that of another, so its ratio is higher. A text without
    predicted tokens has 0.
    """
    alone = np.array([one.said.sum() for one in tokens])
    return np.asarray(np.divide(conditional, alone, out=np.zeros(len(alone)), where=alone < 0))


def log_likelihoods_after(subject: Subject, file: Path) -> Floats:
    """(texts,) the log-likelihood of each text after the prefix, over the same tokens as without it."""
    with in_options():
        prefix = _prefix(subject, file)
    read = subject.texts.examples
    own = zip(read.input_ids, read.columns["labels"], strict=True)
    given = [_after(prefix, *one, subject.tokenizer.bos_token_id) for one in own]
    columns = {"input_ids": tuple(ids for ids, _ in given), "labels": tuple(labels for _, labels in given)}
    examples = Encoded({**read.columns, **columns})
    found = tokens_of(subject.model, subject.task, subject.tokenizer, examples, _BATCH)
    return np.array([one.said.sum() for one in found])


Ids = NDArray[np.integer[Any]]
_SHOTS = 12  # texts of the prefix, at most
_LONGEST = 2048  # tokens, if the model states no limit
_BATCH = 2


def _prefix(subject: Subject, file: Path) -> Ids:
    """The tokens of the file's first texts, as many as fit before the longest text.

    They must not be among the audited texts: after a copy of itself, every text is likely.
    """
    tables = sources.of_one_party(subject.task, [file], "--recall")
    rows = subject.task.rows(tables, Vocabulary((), ()))
    both = set(subject.texts.plain) & set(plain_of(rows))
    if both:
        raise DataError(
            f"{file} has {len(both)} texts of --members or --non-members: --recall needs texts that were in no training"
        )
    limit = positions_of(subject.model) or _LONGEST
    room = limit - int(subject.texts.examples.lengths.max())
    encoded = subject.task.encode(subject.tokenizer, rows.take(range(min(_SHOTS, len(rows)))), limit)
    found: list[Ids] = []
    for ids in encoded.input_ids:
        if len(ids) and sum(len(one) for one in found) + len(ids) <= room:
            found.append(ids)
    if not found:
        raise UsageError(
            f"no text of --recall fits in front of a text: the model reads {limit} tokens, and the texts take up to "
            f"{limit - room}: lower --max-length"
        )
    return np.concatenate(found)


def _after(prefix: Ids, ids: Ids, labels: Ids, begin: int | None) -> tuple[Ids, Ids]:
    """The text appended to the prefix, without its begin token. Its first token is not scored, as without a prefix."""
    labels = np.concatenate([[IGNORED], labels[1:]])
    first = int(len(ids) > 1 and ids[0] == begin)
    return np.concatenate([prefix, ids[first:]]), np.concatenate([np.full(len(prefix), IGNORED), labels[first:]])


def neighbourhood(losses: Floats, neighbours: Sequence[Floats]) -> Floats:
    """The mean loss of a text's neighbours minus its own (Mattern et al. 2023, arXiv 2305.18462): a memorised text has a far
    lower loss than its neighbours, which have one word changed. neighbours: (texts,) each, one of each text.
    """
    return calibrated(losses, neighbours)


_WORD = re.compile(r"\w+")
_MARKS = tuple(map(chr, range(0xE000, 0xE100)))  # of Unicode's private use, and part of no word; one between answers
_CANDIDATES = 10  # words proposed for a place; those equal to the text's own are dropped
_TASKS = ("classification", "multi_label", "regression", "causal_lm", "chat")


def neighbour_losses(subject: Subject, count: int, masked: str = "") -> list[Floats]:
    """`count` times (texts,) losses of one neighbour of each text; of the text itself if it has no word to change.

    masked: a masked language model, by name or folder. It proposes words for each place; the most probable whole words are
    taken. Without it a neighbour lacks one word, which is a cruder change. Of a conversation the words of the assistant's turns
    are changed, which are learned.
    """
    if subject.asked.data.task not in _TASKS:
        raise UsageError(
            f"--neighbours changes words, and the labels of {subject.task.title} belong to single words: leave it out"
        )
    task, rows, field = subject.task, subject.texts.rows, "text"
    if isinstance(task, Chats):
        chats = [left for left, _, _ in task.turns(subject.tokenizer, rows, subject.asked.max_length)]
        marks = [next(one for one in _MARKS if all(one not in said for _, said in chat)) for chat in chats]
        answers = [[said for role, said in chat if role == ASSISTANT] for chat in chats]
        texts = [mark.join(said) for mark, said in zip(marks, answers, strict=True)]
    else:
        field = "text_b" if subject.language_model and rows.text_b is not None else field
        texts = [_read(text, subject) for text in getattr(rows, field)]
    made = _swapped(texts, count, masked) if masked else [dropped(text, count) for text in texts]
    near = [[of_text[number] for of_text in made] for number in range(count)]
    read: Sequence[Sequence[Any]] = near
    if isinstance(task, Chats):
        parts = [[text.split(mark) for text, mark in zip(some, marks, strict=True)] for some in near]
        read = [_in_room(subject, chats, some) for some in parts]
    return [subject.reading(replace(rows, **{field: tuple(some)})).losses() for some in read]


def _in_room(subject: Subject, chats: Sequence[Chat], answers: Sequence[Sequence[str]]) -> list[Chat]:
    """The conversations with these answers; a conversation itself where with them it would lose a turn to `--max-length`."""
    changed: list[Chat] = []
    for chat, said in zip(chats, answers, strict=True):
        left = iter(said)
        changed.append(tuple((role, next(left) if role == ASSISTANT else text) for role, text in chat))
    rows = replace(subject.texts.rows, text=changed)
    lost = subject.task.encode(subject.tokenizer, rows, subject.asked.max_length).columns[ASIDE]
    return [chat if gone else new for chat, new, gone in zip(chats, changed, lost, strict=True)]


def dropped(text: str, count: int) -> list[str]:
    """`count` copies, each without a different word; with fewer words, starting again from the first."""
    words = list(_WORD.finditer(text))
    if len(words) < 2:
        return [text] * count
    order = np.random.default_rng(len(text)).permutation(len(words))
    return [text[: words[at].start()] + text[words[at].end() :] for at in np.resize(order, count)]


def _read(text: str, subject: Subject) -> str:
    """The part of a text that the audited model reads: a changed word behind it would have no effect."""
    if not subject.tokenizer.is_fast:
        return text
    read = subject.tokenizer(text, truncation=True, max_length=subject.asked.max_length, return_offsets_mapping=True)
    return text[: max((int(end) for _, end in read["offset_mapping"]), default=0)]


def _swapped(texts: Sequence[str], count: int, name: str) -> list[list[str]]:
    import transformers

    with in_options("--neighbour-model"), quiet(), explained(name):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(locate(name))
    if tokenizer.mask_token_id is None or not tokenizer.is_fast:
        raise ModelError(
            f"--neighbour-model {name} is no masked language model with a fast tokenizer: name one such as a BERT"
        )
    with in_options("--neighbour-model"), quiet(), explained(name):
        model = transformers.AutoModelForMaskedLM.from_pretrained(locate(name)).eval()
    return [_of_text(text, count, tokenizer, model) for text in texts]


@torch.no_grad()
def _of_text(text: str, count: int, tokenizer: Any, model: Any) -> list[str]:
    """The `count` most probable texts with one word swapped; the text itself where there are fewer."""
    read = tokenizer(text, return_offsets_mapping=True, truncation=True, max_length=512)
    words = {match.span() for match in _WORD.finditer(text)}
    places = [at for at, span in enumerate(read["offset_mapping"]) if tuple(span) in words]
    if not places:
        return [text] * count
    ids = torch.tensor(read["input_ids"]).repeat(len(places), 1)
    ids[range(len(places)), places] = tokenizer.mask_token_id
    log = model(input_ids=ids).logits[range(len(places)), places].log_softmax(1)  # (places, words)
    found: list[tuple[float, str]] = []
    for row, at in enumerate(places):
        start, end = read["offset_mapping"][at]
        own = text[start:end]
        # p(new) / (1 - p(own)), the paper's swap probability
        rest = float(torch.log1p(-log[row, read["input_ids"][at]].exp().clamp(max=1 - 1e-6)))
        best = log[row].topk(_CANDIDATES)
        for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            word = _as(own, tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(token)]).strip())
            if _WORD.fullmatch(word) and word.lower() != own.lower():
                found.append((score - rest, text[:start] + word + text[end:]))
    best_first = [changed for _, changed in sorted(found, key=lambda one: -one[0])]
    return [*best_first, *[text] * count][:count]


def _as(own: str, word: str) -> str:
    """`word` with the capitalisation of `own`."""
    if own.isupper() and len(own) > 1:
        return word.upper()
    return word[:1].upper() + word[1:] if own[:1].isupper() else word


def own_scores(file: Path, subject: Subject) -> Floats:
    """(texts,) the scores of a user-defined signal: the file's function `scores(subject)`, higher for members.

    `subject` (`attacks.any_model.subject.Subject`) has the model, its tokenizer, the task, `texts` and `losses()`, and for
    language models `tokens()`. The first `subject.texts.members` rows are the members: a signal must not use this number, or
    its result is meaningless.

    ConfigError, naming the file, if the function fails or does not return a number for each text.
    """
    function = getattr(executed(file), "scores", None)
    if not callable(function):
        raise refused(file, "has no function scores(subject) that returns a number for each text")
    found = np.asarray(guarded(file, function)(subject))
    count = len(subject.texts.rows)
    if found.shape != (count,) or found.dtype.kind not in "fiub" or not np.isfinite(found).all():
        raise refused(
            file, f"returned {found.dtype} of shape {found.shape}: it must return {count} finite numbers, one a text"
        )
    return found.astype(np.float64)
