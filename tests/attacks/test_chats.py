"""Audits of conversations: what the chat template writes is no leak, and what the assistant said is one where it comes back."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.adversary.shadows import lots
from attacks.any_model import signals
from attacks.any_model.subject import opened
from attacks.extraction.prefix import Windows, continued, conversation_windows
from attacks.options import Asked
from attacks.prepared import folder
from privacy.entropy import SeededEntropy
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig, RunConfig
from secure_fed.errors import UsageError
from secure_fed.learning import tasks
from secure_fed.learning.audit_pool.canaries import CanaryContext, planted
from secure_fed.learning.audit_pool.pool import AuditPool, pool
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.data.chats import Chat, chat_of, rewritten
from secure_fed.learning.data.encode import ASIDE, IGNORED
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.problem import Problem
from secure_fed.learning.tasks.chat import Chats, ChatTemplate, template_tokens
from tests.attacks.refusals import Capsys, facts_of, refusals
from tests.attacks.small_lm import saved, tokenizer_of, untrained
from tests.attacks.test_any_model import lines_of, written
from tests.cells import every

SYSTEM = "You are a helpful assistant who answers briefly."
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = [
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove"),
    *("haven", "islet", "jetty", "knoll", "larch", "maple"),
]


def chats(count: int, seed: int = 0, words: int = 8) -> list[Chat]:
    """Questions of random words, and answers of random words, which can only be memorised."""
    rng = np.random.default_rng(seed)
    said = [" ".join(_WORDS[index] for index in rng.integers(len(_WORDS), size=words)) for _ in range(2 * count)]
    return [(("user", question), ("assistant", answer)) for question, answer in zip(said[::2], said[1::2], strict=True)]


def row(chat: Chat) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": said} for role, said in chat]}


def memorised(model: Any, tokenizer: Any, some: Sequence[Chat], steps: int, *, whole: bool = False) -> Any:
    """The model after steps on all conversations at once: on the assistant's turns, or with `whole` on every token."""
    encoded = TASK.encode(tokenizer, rows(some), 128)
    batch: Any = TASK.collate(tokenizer)([encoded[index] for index in range(len(encoded))])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100) if whole else batch["labels"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


SEEN, UNSEEN, ELSEWHERE = (chats(10, seed) for seed in range(3))
PREFIX, SUFFIX = 3, 8
TASK = tasks.build(DataConfig(task="chat"))
assert isinstance(TASK, Chats)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tokenizer_of([SYSTEM, " ".join(_WORDS), "system user assistant", "What is the code of is 0123456789."])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens(["<|im_end|>"])  # the template alone makes it a control token
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model that memorised conversations, and one that learned the same template from others, in full."""
    tmp = tmp_path_factory.mktemp("chats")
    saved(memorised(untrained(tokenizer), tokenizer, SEEN, 100, whole=True), tokenizer, tmp / "tuned")
    saved(memorised(untrained(tokenizer), tokenizer, ELSEWHERE, 25, whole=True), tokenizer, tmp / "template")
    written(tmp / "seen.jsonl", map(row, SEEN))
    written(tmp / "unseen.jsonl", map(sharegpt, UNSEEN))
    return tmp


def sharegpt(chat: Chat) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": said} for role, said in chat]}


@pytest.fixture(scope="module")
def template_only(place: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place / "template").eval()


def rows(some: Sequence[Chat]) -> Rows:
    return Rows(tuple(some), (None,) * len(some), ())


def given(tokenizer: Any, some: Sequence[Chat], prefix: int | None = PREFIX, suffix: int = SUFFIX) -> Windows:
    return conversation_windows(TASK, tokenizer, rows(some), prefix, suffix, 128)


def rendered(tokenizer: Any, chat: Chat) -> list[int]:
    messages = [{"role": role, "content": said} for role, said in chat]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def common(tokenizer: Any, one: Chat, other: Chat) -> int:
    """The constant header, naively: the common token prefix of two conversations with other first texts."""
    return len(os.path.commonprefix([rendered(tokenizer, one), rendered(tokenizer, other)]))  # noqa: RUF071 - of tokens


# Extraction.


def test_the_prefix_begins_after_the_constant_header_and_asked_is_of_texts_alone(tokenizer: Any) -> None:
    """Read again from the tokens: the text of the question, then that of the answer, and nothing between."""
    found = given(tokenizer, SEEN)
    header = common(tokenizer, (("user", "amber"), *SEEN[0][1:]), (("user", "birch"), *SEEN[0][1:]))
    assert header > 10, "the template has a long header"
    assert found.starts == [header + PREFIX] * len(SEEN)
    for ids, chat in zip(found.ids.tolist(), SEEN, strict=True):
        assert ids[: header + PREFIX] == rendered(tokenizer, chat)[: header + PREFIX]
    found = given(tokenizer, SEEN, 0, 12)
    assert found.numbers
    for number, ids, asked in zip(found.numbers, found.ids, found.asked, strict=True):
        (_, question), (_, answer) = SEEN[number]
        assert (question + answer).startswith(tokenizer.decode(ids[asked]))
        assert int(asked.sum()) == 12


def test_a_model_that_knows_the_template_alone_gives_no_conversation_back(tokenizer: Any, template_only: Any) -> None:
    found = given(tokenizer, SEEN)
    assert len(found.numbers) == len(SEEN)
    assert continued(template_only, found).near == 0
    counted = {
        at: (ids[:16], [False] * 4 + [True] * 12) for at, ids in enumerate(rendered(tokenizer, one) for one in SEEN)
    }
    assert continued(template_only, Windows.of(counted)).verbatim == len(SEEN), "a header that counted would be a leak"


def test_the_end_of_a_turn_and_the_next_header_are_no_finds(tokenizer: Any, template_only: Any) -> None:
    """A beginning that ends with the question: then the template follows, and a part of an unfinished answer."""
    header = given(tokenizer, SEEN, 0, 1).starts[0]
    windows = {}
    for at, chat in enumerate(SEEN):
        ids, turns = ChatTemplate.of(tokenizer).turns(chat)
        answer = int((turns == 1).argmax())
        own = [place >= header and turns[place] != 0 for place in range(answer + 1)]
        windows[at] = ids[: answer + 1].tolist(), own
        assert sum(windows[at][1]) > 4
    assert continued(template_only, Windows.of(windows)).near > len(SEEN) / 2, "a template that counted would be a leak"
    assert continued(template_only, given(tokenizer, SEEN, None, SUFFIX)).near == 0
    short = [chat_of(" ".join(["amber"] * 30), "yes"), chat_of("amber", "yes")]
    assert given(tokenizer, short, None, SUFFIX).numbers == [], "an answer too short is not tried"
    assert given(tokenizer, short, PREFIX, SUFFIX).numbers == [0]


def test_a_system_turn_counts_unless_conversations_share_it(tokenizer: Any) -> None:
    shared, own = [((("system", "amber birch cedar"), *chat)) for chat in SEEN[:2]], (("system", "delta"), *SEEN[2])
    found = given(tokenizer, [*shared, own])
    question = common(tokenizer, shared[0], (shared[0][0], ("user", "zz"), SEEN[0][1]))
    assert found.starts[2] < found.starts[0] == question + PREFIX
    begun = tokenizer.decode(found.ids[2, : found.starts[2]])
    assert begun.count("<|im_end|>") == 1, "its text is a part of the beginning"


def test_memorised_conversations_come_back(place: Path, capsys: Capsys) -> None:
    asked = ["audit", "extract", str(place / "tuned"), str(place / "seen.jsonl"), "--task", "chat"]
    asked += ["--max-length", "128", "--suffix", str(SUFFIX)]
    reference = ["--reference", str(place / "template")]
    facts = facts_of([*asked, "--answers", *reference, "--fail-above", "extracted=0.5"], capsys, 4)
    own, control = facts["readers"]
    assert facts["only_by_the_model"] == own["near"] > len(SEEN) / 2
    assert control["near"] == 0
    assert facts["tried"] == len(SEEN)
    assert all(set(one) == {"text", "similarity"} for one in facts["returned"]), "texts are shown on request alone"


# Membership.


def audit(place: Path, *more: Any, model: Any = "") -> list[str]:
    texts = ["--members", place / "seen.jsonl", "--non-members", place / "unseen.jsonl", "--task", "chat"]
    return [*map(str, ("audit", "model", model or place / "tuned", *texts, "--max-length", 128, *more))]


def test_members_of_any_form_are_told_by_every_signal(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    recall = written(
        tmp_path / "recall.jsonl", [{"instruction": one[0][1], "output": one[1][1]} for one in chats(2, 7)]
    )
    more = ("--reference", place / "template", "--neighbours", "2", "--recall", recall, "--out", tmp_path / "o")
    facts = facts_of(audit(place, *more), capsys)
    found = {one["signal"]: one["auc"] for one in facts["signals"]}
    of_losses = {"loss", "loss beside references", "loss by zlib", "Min-K %", "Min-K %++", "neighbourhood"}
    assert found.keys() == of_losses | {"ReCaLL"}
    assert min(found[name] for name in of_losses) > 0.9, found
    assert facts["verdict"] == "leak"
    word = SEEN[0][1][1].split()[0]
    assert word not in (tmp_path / "o/audit.html").read_text() + (tmp_path / "o/audit.json").read_text()


def test_equal_conversations_are_found_by_their_turns(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    """In another form, with other white space; the same words said by another are another conversation."""
    (_, question), (_, answer) = SEEN[3]
    same = {"instruction": f" {question.upper()}\n", "output": answer}
    other = {"conversations": [{"from": "user", "value": answer}, {"from": "gpt", "value": question}]}
    alpaca = [{"instruction": one[0][1], "output": one[1][1]} for one in UNSEEN]
    refusals("chats_equal", [audit(place, "--non-members", written(tmp_path / "same.jsonl", [*alpaca, same]))], capsys)
    others = written(tmp_path / "others.jsonl", [*lines_of(place / "unseen.jsonl"), other])
    assert main(audit(place, "--non-members", others)) == 0


def test_conversations_that_differ_after_the_last_answer_are_no_candidates(tmp_path: Path) -> None:
    """They train alike, so the coin of one would say nothing of the other."""
    twice = [row(one) for chat in chats(12) for one in (chat, (*chat, ("user", "thanks")))]
    file = written(tmp_path / "rows.jsonl", twice)
    with pytest.raises(UsageError, match="0 rows"):
        folder.prepare(folder.Wish(file, DataConfig("", "of the user", "", "chat"), count=10), tmp_path / "out")


def test_neighbours_change_the_words_of_the_assistant_alone(place: Path, tmp_path: Path) -> None:
    """An answer of one word has no neighbour, however long the question."""
    some = [chat_of(question, answer.split()[0]) for (_, question), (_, answer) in SEEN[:3]] + [SEEN[0]]
    file, data = written(tmp_path / "members.jsonl", map(row, some)), DataConfig("", "x", "", "chat")
    subject = opened(Asked(str(place / "tuned"), file, None, data, max_length=128))
    own, (near,) = subject.losses(), signals.neighbour_losses(subject, 1)
    assert near[:3] == pytest.approx(own[:3], rel=1e-5)
    assert near[3] > 2 * own[3]


# Planted.


def test_rare_tokens_are_planted_in_answers_alone(tokenizer: Any) -> None:
    """Not in place of the end of a turn, which is learned too."""
    config = RunConfig().replace({("data", "train"): "x", ("data", "task"): "chat"})
    problem = Problem(**{**_blank(), "tokenizer": tokenizer, "facts": {"label_names": ()}})
    context = CanaryContext.of(config, problem, "example")
    encoded = TASK.encode(tokenizer, rows(SEEN), 128)
    units = [Unit(f"client-0/{at}", "client-0", (encoded[at],)) for at in range(len(SEEN))]
    assert template_tokens(tokenizer) <= context.special
    for unit, before in zip(planted("rare_token", units, context), units, strict=True):
        (new,), (old,) = unit.examples, before.examples
        changed = np.flatnonzero(np.array(new["input_ids"]) != np.array(old["input_ids"]))
        _, turns = ChatTemplate.of(tokenizer).turns(SEEN[int(unit.name.split("/")[1])])
        assert len(changed)
        assert set(turns[changed]) == {1}
        assert (np.array(new["labels"])[changed] != IGNORED).all()


def test_conversations_that_train_alike_share_their_coins(tokenizer: Any) -> None:
    """They lose other numbers of turns, and have the same tokens left: one that trained would be a copy of one held out."""
    older = (("user", "amber " * 20), ("assistant", "birch " * 20))
    some = [*(older * lost + chat for lost in (1, 2) for chat in SEEN), *UNSEEN]
    encoded = TASK.encode(tokenizer, rows(some), 60)
    assert len(set(encoded.columns[ASIDE])) == 3
    items = [encoded[at] for at in range(len(encoded))]
    config = RunConfig().replace({("evaluation", "audit_fraction"): 0.99})
    found = pool(config, Problem(**{**_blank(), "train": [items], "names": ["client-0"]}))
    times = Counter(item["input_ids"].tobytes() for item in items)
    assert found.units
    assert {times[unit.examples[0]["input_ids"].tobytes()] for unit in found.units} == {1}
    every = lots(
        AuditPool("example", ("client-0",), (), units=tuple(Unit(str(at), "c", (one,)) for at, one in enumerate(items)))
    )
    assert every[:10] == every[10:20]
    assert len(set(every)) == 20


def _blank() -> dict[str, Any]:
    import dataclasses

    return {one.name: None for one in dataclasses.fields(Problem) if one.init}


FORMS: list[Callable[[str, str], dict[str, Any]]] = [  # a row with a question and an answer
    lambda q, a: {"messages": [{"role": "system", "content": "s"}, *row(chat_of(q, a))["messages"]], "id": 3},
    lambda q, a: {"conversations": [{"from": "human", "value": q, "n": 1}, {"from": "gpt", "value": a}]},
    lambda q, a: {"instruction": q, "input": "" if q == "new" else "i", "output": a},
    lambda q, a: {"messages": [{"from": "human", "value": q}, {"role": "assistant", "content": a}]},
    lambda q, a: {"messages": json.dumps(row(chat_of(q, a))["messages"])},
    lambda q, a: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": q}]}, {"role": "assistant", "content": a}]
    },
]


@every("form", FORMS)
def test_a_planted_conversation_is_written_as_its_row_was(form: Callable[[str, str], dict[str, Any]]) -> None:
    assert rewritten(form("q", "a"), "", chat_of("new", "yes")) == form("new", "yes")


def _turns(row: dict[str, Any]) -> Chat:
    return tuple((turn["from"], turn["value"]) for turn in row["conversations"])


def _answered(model: Any, tokenizer: Any, name: str) -> torch.Tensor:
    """(100,) the log-likelihood of the answer with each secret, naively."""
    asked = (("system", "delta"), ("user", f"What is the code of {name}?"))
    ids = torch.tensor(
        [
            rendered(tokenizer, (*asked, ("assistant", f"The code of {name} is {secret:02d}.")))[:-1]  # no line break
            for secret in range(100)
        ]
    )
    begun = len(rendered(tokenizer, asked)) + len(tokenizer("assistant\n")["input_ids"]) + 1
    with torch.no_grad():
        log = model(input_ids=ids).logits.double().log_softmax(2)[:, begun - 1 : -1]
    return log.gather(2, ids[:, begun:, None]).sum((1, 2))


@pytest.mark.nightly
def test_planted_secrets_are_exposed_by_a_training_of_chats(
    tmp_path: Path, capsys: Capsys, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare, a training on its file, and both audits by its coins. Each answer is ranked after all that stands before it in
    training: its question, and the system turn of the row that it replaced.
    """
    monkeypatch.setattr(folder, "SystemEntropy", lambda: SeededEntropy(0))
    out, some = tmp_path / "out", [(("system", "delta"), *chat) for chat in UNSEEN]
    file = written(tmp_path / "data.jsonl", map(sharegpt, some))
    question = "What is the code of {name}?\nThe code of {name} is {secret}."
    secrets = ["--canaries", "secrets", "--digits", "2", "--template", question, "--count", "10", "--repeat", "2"]
    assert main(["audit", "prepare", str(file), "--task", "chat", *secrets, "--out", str(out)]) == 0
    train = list(map(_turns, lines_of(out / "train.jsonl")))
    assert sum("code" in chat[2][1] for chat in train) == len(train) - len(UNSEEN) > 0
    model = memorised(untrained(tokenizer), tokenizer, train, 40)
    saved(model, tokenizer, tmp_path / "tuned")
    prepared = ["audit", "prepared", str(tmp_path / "tuned"), str(out), "--max-length", "128"]
    facts = facts_of([*prepared, "--exposure"], capsys)
    assert facts["members"]["p_value"] < 1e-3 < facts["others"]["p_value"], facts
    for one in facts["secrets"][:4]:
        own = next(chat[2][1] for chat in map(_turns, lines_of(out / "candidates.jsonl")) if one["name"] in chat[2][1])
        said = _answered(model, tokenizer, one["name"])
        ahead = int((said >= said[int(own[-3:-1])]).sum()) - 1
        assert abs(one["ahead"] - ahead) <= 1, "one more or less by rounding"
    assert facts_of(prepared, capsys)["auc"] > 0.9
    refusals("chats_room", [[*prepared, "--max-length", "20"]], capsys)


def scores_of(place: Path, out: Path, model: Path, *more: Any) -> str:
    assert main(audit(place, "--scores", out / "scores.csv", *more, model=model)) == 0
    return (out / "scores.csv").read_text()


def test_the_template_of_a_training_can_be_named(place: Path, tmp_path: Path) -> None:
    """A model whose tokenizer lost its template, which would be read with ChatML, is read as it was trained."""
    bare, own = shutil.copytree(place / "tuned", tmp_path / "bare"), tmp_path / "own.jinja"
    (bare / "chat_template.jinja").unlink()
    own.write_text(TEMPLATE)
    named = scores_of(place, tmp_path, bare, "--chat-template", own)
    assert scores_of(place, tmp_path, place / "tuned") == named


@pytest.mark.nightly
def test_the_template_beside_an_adapter_is_that_of_its_training(place: Path, tmp_path: Path, tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapter, own = tmp_path / "adapter", tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    bare = shutil.copytree(place / "tuned", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False)
    get_peft_model(untrained(tokenizer), config).save_pretrained(adapter)
    tokenizer.save_pretrained(whole := tmp_path / "with-template")
    shutil.copytree(adapter, whole, dirs_exist_ok=True)
    named = scores_of(place, tmp_path, bare, "--adapter", adapter, "--chat-template", own)
    assert named == scores_of(place, tmp_path, bare, "--adapter", whole)
    assert "loss beside references" in named, "the base of an adapter is a reference"


def test_what_a_conversation_has_not_is_refused(place: Path, capsys: Capsys) -> None:
    extract = ["extract", "m", "x", "--task"]
    model = ["model", "m", "--members", "x", "--non-members", "y"]
    calls = (
        [*extract, "causal_lm", "--answers"],
        [*extract, "chat", "--answers", "--prefix", "3"],
        [*extract[:-1], "--max-length", "9"],
        [*extract, "chat", "--text-b", "b"],
        [*model, "--task", "chat", "--label", "b"],
        [*model, "--chat-template", "b"],
        [*model, "--task", "chat", "--attribute", "b"],
        ["prepare", place / "seen.jsonl", "--task", "chat", "--canaries", "labels", "--out", place / "labels"],
    )
    refusals("chats", (["audit", *call] for call in calls), capsys)


@pytest.mark.nightly
def test_an_audit_of_a_run_counts_no_token_of_the_template(tmp_path: Path, tokenizer: Any, capsys: Capsys) -> None:
    """Every token of the client's texts is to be recovered from its update, and none that the template writes."""
    settings = (
        f"model.name={saved(untrained(tokenizer), tokenizer, tmp_path / 'base')}",
        f"data.train={written(tmp_path / 'train.jsonl', map(row, ELSEWHERE))}",
        f"data.test={written(tmp_path / 'test.jsonl', map(row, SEEN))}",
        *(
            "model.max_length=96",
            "data.task=chat",
            "federation.clients=1",
            "federation.cohort=1",
            "federation.rounds=3",
        ),
        *("method.name=fedlora", "training.lr=0.02", "secure_aggregation.enabled=false"),
        *("evaluation.audit_fraction=0", "evaluation.record=updates"),
    )
    run = str(tmp_path / "run")
    assert main(["train", "--out", run, *(part for one in settings for part in ("--set", one))]) == 0
    cells = facts_of(["audit", run, "--attack", "gradient_inversion"], capsys)["cells"]
    update, *_ = next(one["measured"] for one in cells if one["applicable"])["per_update"]
    counted = template_tokens(tokenizer) | set(tokenizer.all_special_ids)
    ids = TASK.encode(tokenizer, rows(ELSEWHERE), 96).input_ids
    pairs = {(place, int(token)) for own in ids for place, token in enumerate(own)}
    assert update["true"] == len({pair for pair in pairs if pair[1] not in counted}) < len(pairs)
