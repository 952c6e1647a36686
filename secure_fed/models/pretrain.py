"""Pre-trains `builtin/tiny` on the public part of `builtin/notes`: python -m secure_fed.models.pretrain OUT"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from secure_fed.data import notes
from secure_fed.data.notes_words import CONCLUSIONS

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
IGNORED = -100


def train_tokenizer(texts: tuple[str, ...], size: int) -> PreTrainedTokenizerFast:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    spelled = [letters[k:] + letters[:k] for k in range(len(letters))]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=40))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=list(letters + "!\"#$%&'()*+,-./:;<=>?@[]_"), min_frequency=2)
    tokenizer.train_from_iterator([*texts, *spelled], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))])
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", model_max_length=160)


class Masker:
    def __init__(self, tok, rng, salient=0.5, ordinary=0.08):
        self.tok, self.rng = tok, rng
        ids = [tok.convert_tokens_to_ids(w) for pair in CONCLUSIONS for w in pair]
        assert tok.unk_token_id not in ids
        self.is_salient = np.zeros(len(tok), bool); self.is_salient[ids] = True
        self.s, self.o = salient, ordinary

    def __call__(self, rows):
        L = max(map(len, rows))
        ids = np.zeros((len(rows), L), np.int64); tgt = np.full((len(rows), L), IGNORED)
        for i, r in enumerate(rows):
            if self.is_salient[r[1]]:
                tgt[i, 0] = r[1]; r = [r[0], *r[3:]]
            ids[i, :len(r)] = r
        real = ids >= len(SPECIAL)
        p = np.where(self.is_salient[ids], self.s, self.o)
        hit = real & (self.rng.random(ids.shape) < p)
        tgt[hit] = ids[hit]; ids[hit] = self.tok.mask_token_id
        return torch.from_numpy(ids), torch.from_numpy(tgt)


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("out", type=Path); ap.add_argument("--steps", type=int, default=2000)
    ap.add_argument("--batch", type=int, default=128); ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--threads", type=int, default=1); ap.add_argument("--hidden", type=int, default=128)
    ap.add_argument("--layers", type=int, default=3); ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--heads", type=int, default=4); ap.add_argument("--ordinary", type=float, default=.08)
    ap.add_argument("--init", type=float, default=.05); ap.add_argument("--sorted", type=float, default=.6); ap.add_argument("--sal", type=float, default=.7); ap.add_argument("--ffn", type=int, default=512)
    a = ap.parse_args()
    torch.set_num_threads(a.threads); torch.manual_seed(a.seed)
    t0 = time.time()
    pub = notes.generate(a.steps * a.batch, seed=a.seed, split="public")
    held = notes.generate(1000, seed=a.seed + 1, split="public")
    tok = train_tokenizer(pub.text[:20000], 1200)
    enc = [e.ids for e in tok._tokenizer.encode_batch(list(pub.text))]
    print(f"data {time.time()-t0:.1f}s vocab {len(tok)} mean len {np.mean([len(e) for e in enc]):.1f} max {max(len(e) for e in enc)}", flush=True)
    rng = np.random.default_rng(a.seed)
    mask = Masker(tok, rng, salient=a.sal, ordinary=a.ordinary); hm = Masker(tok, np.random.default_rng(1), salient=1.0, ordinary=0.0)
    held = held.take(range(400)); hx, hy = hm([e.ids for e in tok._tokenizer.encode_batch(list(held.text))])
    cfg = BertConfig(vocab_size=len(tok), hidden_size=a.hidden, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        intermediate_size=a.ffn, max_position_embeddings=160, initializer_range=a.init, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)
    model = BertForMaskedLM(cfg); print(sum(p.numel() for p in model.parameters()))
    ang = torch.arange(160)[:, None] * (10000 ** (-torch.arange(0, a.hidden, 2) / a.hidden))[None]
    model.bert.embeddings.position_embeddings.weight.data = .1 * torch.stack([ang.sin(), ang.cos()], -1).flatten(1)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(.9, .98), weight_decay=.01)
    warm = min(200, a.steps // 10)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / warm, max(.02, (a.steps - s) / (a.steps - warm))))
    group = {d: None for d in CONCLUSIONS}
    cls_of = np.full(len(tok), -1)
    for k, pair in enumerate(CONCLUSIONS):
        for w in pair: cls_of[tok.convert_tokens_to_ids(w)] = k
    def evaluate():
        model.eval()
        with torch.no_grad(): lg = model(hx, attention_mask=(hx != 0).long()).logits
        sel = hy != IGNORED
        pr = cls_of[lg.argmax(-1)[sel]]; g = cls_of[hy[sel]]; t = sel.nonzero()[:, 1].numpy() == 0
        L = (hx != 0).sum(1)[sel.nonzero()[:, 0]].numpy(); ok = pr == g
        for lo, hi in ((0, 24), (24, 34), (34, 46), (46, 99)): print(f"{lo}: {ok[t & (L >= lo) & (L < hi)].mean():.2f} {ok[~t & (L >= lo) & (L < hi)].mean():.2f}", end=" | ")
        model.train(); return (pr == g)[t].mean(), (pr == g)[~t].mean()
    n1 = int(len(enc) * a.sorted)
    enc = sorted(enc[:n1], key=lambda e: len(e) + 12 * rng.random()) + enc[n1:]
    t0 = time.time(); per = 16 * a.batch; s = 0
    for start in range(0, len(enc), per):
        blk = sorted(enc[start:start + per], key=len)
        bs = [blk[k:k + a.batch] for k in range(0, len(blk), a.batch)]
        for j in rng.permutation(len(bs)):
            x, y = mask(bs[j]); sel = y != IGNORED
            h = model.bert(x, attention_mask=(x != 0).long())[0][sel]
            loss = cross_entropy(model.cls(h), y[sel]); loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); opt.step(); sched.step(); opt.zero_grad(); s += 1
            if s % 200 == 0: print(s, f"{loss.item():.3f} title/rest acc {evaluate()} {time.time()-t0:.0f}s", flush=True)
    model.save_pretrained(a.out); tok.save_pretrained(a.out)
main()
