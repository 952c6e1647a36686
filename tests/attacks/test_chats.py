"""Audits of conversations: what the chat template writes is no leak, and what the assistant said is one where it comes back."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.adversary.shadows import lots
from attacks.any_model import signals
from attacks.any_model.subject import Asked, opened
from attacks.extraction.prefix import Windows, continued, conversation_windows
from attacks.prepared import folder
from privacy.entropy import SeededEntropy
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig, RunConfig
from secure_fed.learning import tasks
from secure_fed.learning.audit_pool.canaries import CanaryContext, planted
from secure_fed.learning.audit_pool.pool import AuditPool, pool
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.data.chats import Chat, chat_of, rewritten
from secure_fed.learning.data.encode import ASIDE, IGNORED
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.problem import Problem
from secure_fed.learning.tasks.chat import Chats, ChatTemplate, template_tokens
from tests.attacks.small_chat import TEMPLATE, chats, memorised, row, tokenizer_of_chats
from tests.attacks.small_lm import saved, untrained
from tests.cells import every

SEEN, UNSEEN, ELSEWHERE = chats(12, 0), chats(12, 1), chats(40, 2)
PREFIX, SUFFIX = 3, 8
TASK = tasks.build(DataConfig(task="chat"))
assert isinstance(TASK, Chats)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of_chats()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model that memorised conversations, and one that learned the same template from others, in full."""
    tmp = tmp_path_factory.mktemp("chats")
    saved(memorised(untrained(tokenizer), tokenizer, SEEN, 150, whole=True), tokenizer, tmp / "tuned")
    saved(memorised(untrained(tokenizer), tokenizer, ELSEWHERE, 60, whole=True), tokenizer, tmp / "template")
    written(tmp / "seen.jsonl", map(row, SEEN))
    sharegpt = [{"conversations": [{"from": role, "value": said} for role, said in chat]} for chat in UNSEEN]
    written(tmp / "unseen.jsonl", sharegpt)
    return tmp


@pytest.fixture(scope="module")
def template_only(place: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place / "template").eval()


def written(path: Path, some: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in some), encoding="utf-8")
    return path


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


def test_the_prefix_begins_after_the_constant_header(tokenizer: Any) -> None:
    found = given(tokenizer, SEEN)
    header = common(tokenizer, (("user", "amber"), *SEEN[0][1:]), (("user", "birch"), *SEEN[0][1:]))
    assert header > 10, "the template has a long header"
    assert found.starts == [header + PREFIX] * len(SEEN)
    for ids, chat in zip(found.ids.tolist(), SEEN, strict=True):
        whole = rendered(tokenizer, chat)
        assert ids[: header + PREFIX] == whole[: header + PREFIX]


def test_what_is_asked_is_of_texts_alone(tokenizer: Any) -> None:
    """Read again from the tokens: the text of the question, then that of the answer, and nothing between."""
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
        windows[at] = (
            ids[: answer + 1].tolist(),
            [place >= header and turns[place] != 0 for place in range(answer + 1)],
        )
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
    assert found.starts[0] == question + PREFIX
    assert found.starts[2] < question + PREFIX
    assert tokenizer.decode(found.ids[2, : found.starts[2]]).count("<|im_end|>") == 1, (
        "its text is a part of the beginning"
    )


def test_memorised_conversations_come_back(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["audit", "extract", str(place / "tuned"), str(place / "seen.jsonl"), "--task", "chat"]
    length, suffix = ["--max-length", "128"], ["--suffix", str(SUFFIX)]
    for beginning in (["--prefix", str(PREFIX)], ["--answers"]):
        reference = ["--reference", str(place / "template")]
        assert main([*asked, *length, *suffix, *beginning, *reference, "--json", "--fail-above", "extracted=0.5"]) == 4
        facts = json.loads(capsys.readouterr().out)
        own, control = facts["readers"]
        assert facts["only_by_the_model"] == own["near"] > len(SEEN) / 2
        assert control["near"] == 0
        assert facts["tried"] == len(SEEN)
        assert all(set(one) == {"text", "similarity"} for one in facts["returned"]), "texts are shown on request alone"
    assert main([*asked, *length, *suffix, "--answers"]) == 0
    hidden = capsys.readouterr().out
    assert main([*asked, *length, *suffix, "--answers", "--show-texts"]) == 0
    shown = capsys.readouterr().out
    word = SEEN[0][1][1].split()[0]
    assert word in shown
    assert word not in hidden
    assert "rows in the file" in hidden


# Membership.


def audit(place: Path, *more: str) -> list[str]:
    texts = ["--members", str(place / "seen.jsonl"), "--non-members", str(place / "unseen.jsonl")]
    return ["audit", "model", str(place / "tuned"), "--task", "chat", "--max-length", "128", *texts, *more]


def test_members_of_any_form_are_told_by_every_signal(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recall = written(
        tmp_path / "recall.jsonl", [{"instruction": one[0][1], "output": one[1][1]} for one in chats(2, 7)]
    )
    more = [
        "--reference",
        str(place / "template"),
        "--neighbours",
        "2",
        "--recall",
        str(recall),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(audit(place, *more, "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    found = {one["signal"]: one["auc"] for one in facts["signals"]}
    assert set(found) == {
        "loss",
        "loss beside references",
        "loss by zlib",
        "Min-K %",
        "Min-K %++",
        "neighbourhood",
        "ReCaLL",
    }
    assert min(auc for name, auc in found.items() if name != "ReCaLL") > 0.9, found
    assert facts["verdict"] == "leak"
    word = SEEN[0][1][1].split()[0]
    assert word not in (tmp_path / "o/audit.html").read_text() + (tmp_path / "o/audit.json").read_text()
    assert main(audit(place, "--show-texts", "--out", str(tmp_path / "shown"))) == 0
    assert word not in capsys.readouterr().out
    assert word in (tmp_path / "shown/audit.html").read_text()


@pytest.mark.nightly
def test_shadows_train_on_conversations_of_two_forms(
    place: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(
        f"""
        model = {{name = "{saved(untrained(tokenizer), tokenizer, tmp_path / "base")}", max_length = 96}}
        data = {{task = "chat", train = "x"}}
        federation = {{clients = 1, cohort = 1, rounds = 2}}
        secure_aggregation = {{enabled = false}}
        method = {{name = "fedlora"}}
        training = {{lr = 0.02}}
        """
    )
    command = audit(place, "--shadows", "4", "--config", str(tmp_path / "c.toml"), "--json")
    at = command.index("--task")
    assert main(command[:at] + command[at + 4 :]) == 0
    found = {one["signal"]: one["auc"] for one in json.loads(capsys.readouterr().out)["signals"]}
    assert found["LiRA"] > 0.8
    assert found["RMIA"] > 0.8


def test_equal_conversations_are_found_by_their_turns(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another form, with other white space; the same words said by another are another conversation."""
    (_, question), (_, answer) = SEEN[3]
    for rows_, status in (
        ([{"instruction": f" {question.upper()}\n", "output": answer}], 2),
        ([{"conversations": [{"from": "user", "value": answer}, {"from": "gpt", "value": question}]}], 0),
    ):
        others = [{"instruction": one[0][1], "output": one[1][1]} for one in UNSEEN] if status else []
        others += [] if status else [json.loads(line) for line in (place / "unseen.jsonl").read_text().splitlines()]
        file = written(tmp_path / "others.jsonl", [*others, *rows_])
        assert main([*audit(place)[:-1], str(file)]) == status
        assert ("row 4 of --members" in capsys.readouterr().err) == bool(status)


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
    assert every[:12] == every[12:24]
    assert len(set(every)) == 24


def _blank() -> dict[str, Any]:
    import dataclasses

    return {one.name: None for one in dataclasses.fields(Problem) if one.init}


NEW = chat_of("new", "yes")


@every(
    ("before", "after"),
    [
        (
            {"messages": [{"role": "system", "content": "s"}, *row(SEEN[0])["messages"]], "id": 3},
            {"messages": [{"role": "system", "content": "s"}, *row(NEW)["messages"]], "id": 3},
        ),
        (
            {"conversations": [{"from": "human", "value": "q", "n": 1}, {"from": "gpt", "value": "a"}]},
            {"conversations": [{"from": "human", "value": "new", "n": 1}, {"from": "gpt", "value": "yes"}]},
        ),
        ({"instruction": "q", "input": "i", "output": "a"}, {"instruction": "new", "input": "", "output": "yes"}),
        (
            {"messages": [{"from": "human", "value": "q"}, {"role": "assistant", "content": "a"}]},
            {"messages": [{"from": "human", "value": "new"}, {"role": "assistant", "content": "yes"}]},
        ),
        ({"messages": json.dumps(row(SEEN[0])["messages"])}, {"messages": json.dumps(row(NEW)["messages"])}),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": "a"},
                ]
            },
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "new"}]},
                    {"role": "assistant", "content": "yes"},
                ]
            },
        ),
    ],
)
def test_a_planted_conversation_is_written_as_its_row_was(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert rewritten(before, "", NEW) == after


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _turns(row: dict[str, Any]) -> Chat:
    return tuple((turn["from"], turn["value"]) for turn in row["conversations"])


def _answered(model: Any, tokenizer: Any, name: str, secret: str) -> float:
    """The log-likelihood of an answer, naively."""
    asked = (("system", "delta"), ("user", f"What is the code of {name}?"))
    ids = rendered(tokenizer, (*asked, ("assistant", f"The code of {name} is {secret}.")))[
        :-1
    ]  # without the last line break
    begun = len(rendered(tokenizer, asked)) + len(tokenizer("assistant\n")["input_ids"]) + 1
    with torch.no_grad():
        log = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(1)
    return float(sum(log[at - 1, ids[at]] for at in range(begun, len(ids))))


def test_planted_secrets_are_exposed_by_a_training_of_chats(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare, a training on its file, and both audits by its coins. Each answer is ranked after all that stands before it in
    training: its question, and the system turn of the row that it replaced.
    """
    monkeypatch.setattr(folder, "SystemEntropy", lambda: SeededEntropy(0))
    out = tmp_path / "out"
    some = [(("system", "delta"), *chat) for chat in UNSEEN]
    file = written(
        tmp_path / "data.jsonl",
        ({"conversations": [{"from": role, "value": said} for role, said in one]} for one in some),
    )
    data = ["audit", "prepare", str(file), "--task", "chat", "--canaries", "secrets"]
    question = "What is the code of {name}?\nThe code of {name} is {secret}."
    assert (
        main([*data, "--digits", "2", "--template", question, "--count", "12", "--repeat", "2", "--out", str(out)]) == 0
    )
    train = list(map(_turns, lines_of(out / "train.jsonl")))
    assert sum("code" in chat[2][1] for chat in train) == len(train) - 12 > 0
    model = memorised(untrained(tokenizer), tokenizer, train, 100)
    saved(model, tokenizer, tmp_path / "tuned")
    capsys.readouterr()
    prepared = ["audit", "prepared", str(tmp_path / "tuned"), str(out), "--max-length", "128", "--json"]
    assert main([*prepared, "--exposure"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["members"]["p_value"] < 1e-3 < facts["others"]["p_value"], facts
    for one in facts["secrets"]:
        said = [_answered(model, tokenizer, one["name"], f"{secret:02d}") for secret in range(100)]
        own = next(chat[2][1] for chat in map(_turns, lines_of(out / "candidates.jsonl")) if one["name"] in chat[2][1])
        ahead = sum(each >= said[int(own[-3:-1])] for each in said) - 1
        assert abs(one["ahead"] - ahead) <= 1, "one more or less by rounding"
    assert main(prepared) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["auc"] > 0.9


def test_the_template_of_a_training_can_be_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model whose tokenizer lost its template is read with ChatML, and otherwise than it was trained."""
    bare = shutil.copytree(place / "tuned", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    auc = []
    for model, more in ((place / "tuned", []), (bare, []), (bare, ["--chat-template", str(tmp_path / "own.jinja")])):
        command = audit(place, *more, "--json")
        command[2] = str(model)
        assert main(command) == 0
        auc.append(json.loads(capsys.readouterr().out)["signals"][0]["auc"])
    assert auc[0] == auc[2]


def test_the_template_beside_an_adapter_is_that_of_its_training(
    place: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model

    bare, adapter = shutil.copytree(place / "tuned", tmp_path / "bare"), tmp_path / "adapter"
    (bare / "chat_template.jinja").unlink()
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False)
    get_peft_model(untrained(tokenizer), config).save_pretrained(adapter)
    scores = []
    for more in ([], ["--chat-template", str(tmp_path / "own.jinja")], None):
        if more is None:
            tokenizer.save_pretrained(adapter)
        command = audit(
            place, "--adapter", str(adapter), "--json", "--scores", str(tmp_path / "scores.csv"), *(more or [])
        )
        command[2] = str(bare)
        assert main(command) == 0
        scores.append((tmp_path / "scores.csv").read_text())
    assert scores[0] != scores[1] == scores[2]
    assert "by the chat template in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["extract", "m", "x", "--task", "causal_lm", "--answers"], "--answers is for --task chat"),
        (["extract", "m", "x", "--task", "chat", "--answers", "--prefix", "3"], "--answers is for --task chat"),
        (["extract", "m", "x", "--max-length", "9"], "--max-length is for --task chat"),
        (["extract", "m", "x", "--task", "chat", "--text-b", "b"], "--text-b is 'b'"),
        (["model", "m", "--members", "x", "--non-members", "y", "--task", "chat", "--label", "b"], "--label is 'b'"),
        (
            ["model", "m", "--members", "x", "--non-members", "y", "--chat-template", "b"],
            "--chat-template is for --task chat",
        ),
        (
            ["model", "m", "--members", "x", "--non-members", "y", "--task", "chat", "--attribute", "b"],
            "without tags, answers or turns",
        ),
    ],
)
def test_what_a_conversation_has_not_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_candidate_without_room_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main(["audit", "prepare", str(place / "seen.jsonl"), "--task", "chat", "--count", "12", *out]) == 0
    short = [str(tmp_path / "out"), "--max-length", "20"]
    assert main(["audit", "prepared", str(place / "tuned"), *short]) == 2
    assert "12 of 12 candidates have no room in 20 tokens" in capsys.readouterr().err
    labels = ["audit", "prepare", str(place / "seen.jsonl"), "--task", "chat", "--canaries", "labels"]
    assert main([*labels, "--out", str(tmp_path / "labels")]) == 2
    assert "--canaries labels is for --task classification" in capsys.readouterr().err


@pytest.mark.nightly
def test_an_audit_of_a_run_counts_no_token_of_the_template(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token of the client's texts is to be recovered from its update, and none that the template writes."""
    saved(untrained(tokenizer), tokenizer, tmp_path / "base")
    settings = {
        "model.name": tmp_path / "base",
        "model.max_length": 96,
        "data.task": "chat",
        "data.train": written(tmp_path / "train.jsonl", map(row, ELSEWHERE)),
        "data.test": written(tmp_path / "test.jsonl", map(row, SEEN)),
        "federation.clients": 1,
        "federation.cohort": 1,
        "federation.rounds": 3,
        "method.name": "fedlora",
        "training.lr": 0.02,
        "secure_aggregation.enabled": "false",
        "evaluation.audit_fraction": 0,
        "evaluation.record": "updates",
    }
    run = str(tmp_path / "run")
    assert (
        main(["train", "--out", run, *(part for one in settings.items() for part in ("--set", "{}={}".format(*one)))])
        == 0
    )
    capsys.readouterr()
    assert main(["audit", run, "--attack", "gradient_inversion", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    update, *_ = next(one["measured"] for one in cells if one["applicable"])["per_update"]
    counted = template_tokens(tokenizer) | set(tokenizer.all_special_ids)
    ids = TASK.encode(tokenizer, rows(ELSEWHERE), 96).input_ids
    pairs = {(place, int(token)) for own in ids for place, token in enumerate(own)}
    assert update["true"] == len({pair for pair in pairs if pair[1] not in counted}) < len(pairs)
