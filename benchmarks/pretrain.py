"""Makes `builtin/tiny`: python benchmarks/pretrain.py OUT [--steps N]

A BERT encoder of 0.73 million parameters, pre-trained by masked language modelling on the public part of
`builtin/notes` (no label and no private note is read). Three choices make a few minutes of CPU enough:
- words that state a conclusion ("recovering", "hereditary") are masked far more often than the others;
- a note's title, which names the subject of this visit (two classes share one), is removed and predicted
  from [CLS], so that the token for the classifier learns which entry matters;
- short notes come first, and positions start from sinusoids, so that attention finds neighbours from the start.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from secure_fed.learning.data import notes
from secure_fed.learning.data.notes import CONCLUSIONS, SUBJECTS

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[]_"
VOCABULARY = 1200  # at most
OFTEN = 5  # a word seen this often becomes a token
PARTS = 300  # tokens of two to four letters that many words share
MAX_POSITIONS = 160
BATCH = 64
STEPS = 2400
RATE = 1e-3
SALIENT, ORDINARY = 0.7, 0.05  # shares masked of concluding words and of all others
SHORT_FIRST = 0.3  # share of the notes read in order of length before the rest comes as drawn
IGNORED = -100  # the target of tokens that are not predicted

Batch = tuple[Tensor, Tensor]  # token ids and targets, both (notes, length)


def vocabulary(words: Counter[str]) -> list[str]:
    """Special tokens, every character (alone and inside a word), frequent words and shared parts of words.

    Chosen by count and then by spelling, because the trainer of `tokenizers` breaks ties differently each run.
    """
    frequent = sorted(words, key=lambda word: (-words[word], word))
    frequent = [word for word in frequent if words[word] >= OFTEN and len(word) > 1]
    parts = Counter(
        ("##" if start else "") + word[start:end]
        for word in frequent
        if word.isalpha()
        for start in range(len(word) - 1)
        for end in range(start + 2, min(start + 4, len(word)) + 1)
    )
    shared = sorted(parts, key=lambda part: (-parts[part], part))[:PARTS]
    characters = [*CHARACTERS, *PUNCTUATION, *(f"##{character}" for character in CHARACTERS)]
    return list(dict.fromkeys([*SPECIAL_TOKENS, *characters, *frequent, *shared]))[:VOCABULARY]


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A lower-case WordPiece tokenizer that can spell any word of Latin letters and digits."""
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    numbered = {token: k for k, token in enumerate(vocabulary(words))}
    tokenizer = Tokenizer(models.WordPiece(numbered, unk_token="[UNK]", max_input_chars_per_word=40))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, unk_token="[UNK]", pad_token="[PAD]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


def concluding(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """For every token id, the number of the conclusion or subject that its word states, or -1."""
    classes = np.full(len(tokenizer), -1)
    for label, said in enumerate((*CONCLUSIONS, *SUBJECTS)):
        classes[tokenizer.convert_tokens_to_ids(list(said))] = label
    return classes


def masked(notes_ids: Sequence[list[int]], salient: np.ndarray, mask_id: int, rng: np.random.Generator) -> Batch:
    """Pads, removes the title (predicted at [CLS]) and masks: `salient` is the masked share of each token id."""
    titles = [ids[1] if salient[ids[1]] > ORDINARY else IGNORED for ids in notes_ids]
    bare = [ids if title == IGNORED else [ids[0], *ids[3:]] for ids, title in zip(notes_ids, titles, strict=True)]
    inputs = np.zeros((len(bare), max(map(len, bare))), dtype=np.int64)
    for row, ids in zip(inputs, bare, strict=True):
        row[: len(ids)] = ids
    hidden = rng.random(inputs.shape) < salient[inputs]
    targets = np.where(hidden, inputs, IGNORED)
    targets[:, 0] = titles
    inputs[hidden] = mask_id
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def batches(encoded: Sequence[list[int]], rng: np.random.Generator) -> Iterator[list[list[int]]]:
    """The notes in batches of like length: short ones first for a while, then in blocks as drawn."""
    early = int(len(encoded) * SHORT_FIRST)
    jitter = 12 * rng.random(early)
    first = [encoded[k] for k in np.argsort([len(encoded[k]) + jitter[k] for k in range(early)], kind="stable")]
    order = [*first, *encoded[early:]]
    for start in range(0, len(order), 16 * BATCH):
        block = sorted(order[start : start + 16 * BATCH], key=len)
        for k in rng.permutation(len(block) // BATCH):
            yield block[k * BATCH : (k + 1) * BATCH]


def build(vocabulary: int, seed: int) -> BertForMaskedLM:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=MAX_POSITIONS, pad_token_id=0, initializer_range=0.05,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    rates = 10_000 ** (-torch.arange(0, config.hidden_size, 2) / config.hidden_size)
    angles = torch.arange(MAX_POSITIONS)[:, None] * rates  # (position, hidden / 2)
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    model.bert.embeddings.position_embeddings.weight.data.copy_(0.1 * waves)
    return model


def word_loss(model: BertForMaskedLM, batch: Batch) -> Tensor:
    """Mean cross-entropy over the masked positions; the vocabulary layer runs on those alone."""
    inputs, targets = batch
    chosen = targets != IGNORED
    states = model.bert(inputs, attention_mask=(inputs != 0).long()).last_hidden_state[chosen]
    return cross_entropy(model.cls(states), targets[chosen])


@torch.no_grad()
def conclusions_right(model: BertForMaskedLM, batch: Batch, classes: np.ndarray) -> tuple[float, float]:
    """Shares of titles, and of conclusions within notes, predicted with a word of the right class."""
    inputs, targets = batch
    chosen = targets != IGNORED
    logits = model(inputs, attention_mask=(inputs != 0).long()).logits[chosen]
    right = classes[logits.argmax(-1).numpy()] == classes[targets[chosen].numpy()]
    title = chosen.nonzero()[:, 1].numpy() == 0
    return float(right[title].mean()), float(right[~title].mean())


def optimise(model: BertForMaskedLM, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW whose rate rises over the first steps and falls linearly over the others."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, min(200, steps // 10))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.02, (steps - step) / (steps - warm + 1)))
    )


def pretrain(steps: int, seed: int) -> tuple[BertForMaskedLM, PreTrainedTokenizerFast, tuple[float, float]]:
    """Trains from scratch; returns the model, its tokenizer and `conclusions_right` on held-out public notes."""
    public = list(notes.generate(steps * BATCH, seed=seed, split="public").text)
    tokenizer = train_tokenizer(public[:20_000])
    encoded = tokenizer(public)["input_ids"]
    held = tokenizer(list(notes.generate(400, seed=seed + 1, split="public").text))["input_ids"]
    rng = np.random.default_rng(seed)
    classes = concluding(tokenizer)
    salient = np.where(classes >= 0, SALIENT, ORDINARY)
    salient[: len(SPECIAL_TOKENS)] = 0.0
    check = masked(held, np.where(classes >= 0, 1.0, 0.0), tokenizer.mask_token_id, rng)
    model = build(len(tokenizer), seed)
    optimizer, schedule = optimise(model, steps)
    right = (0.0, 0.0)
    for step, chosen in enumerate(batches(encoded, rng), start=1):
        loss = word_loss(model, masked(chosen, salient, tokenizer.mask_token_id, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            right = conclusions_right(model, check, classes)
            print(f"step {step}/{steps}: loss {loss.item():.3f}, held-out conclusions right: "
                  f"titles {right[0]:.1%}, within notes {right[1]:.1%}", file=sys.stderr, flush=True)  # fmt: skip
    return model, tokenizer, right


CARD = """\
# builtin/tiny

A BERT encoder with {parameters:,} parameters and {words:,} WordPiece entries, pre-trained from nothing by
masked language modelling on {notes:,} made-up public notes of secure-fed's `builtin/notes`. It knows those
notes and nothing else: it is for demonstrations and tests, never for real text.

Made by `python benchmarks/pretrain.py OUT --steps {steps} --seed {seed} --threads {threads}`
(PyTorch {torch}) in {seconds:.0f} s. On 400 public notes it had not read, it names
{titles:.1%} of the subjects in hidden titles (read at [CLS]) and {within:.1%} of the hidden conclusions rightly.

Two runs of that command on one machine gave the same tensors and the same tokenizer bit for bit (largest absolute
difference 0). Other processors, thread counts or library versions round differently, and training amplifies that:
the accuracy stays, the tensors do not.

The classification head is not part of these weights: loading for classification makes a new pooler and
classifier, which fine-tuning trains. Licence: Apache-2.0, with the rest of secure-fed.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/pretrain.py", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} must be at least 1")
    torch.set_num_threads(arguments.threads)
    began = time.perf_counter()
    model, tokenizer, right = pretrain(arguments.steps, arguments.seed)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    card = CARD.format(
        parameters=model.num_parameters(), words=len(tokenizer), notes=arguments.steps * BATCH, steps=arguments.steps,
        seed=arguments.seed, threads=arguments.threads, torch=torch.__version__, seconds=time.perf_counter() - began,
        titles=right[0], within=right[1],
    )  # fmt: skip
    (arguments.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
