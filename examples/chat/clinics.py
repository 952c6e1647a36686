"""Made-up conversations between patients and the desks of eight clinics, whose answers can be checked.

    python clinics.py write FOLDER [--each 200] [--test 80] [--seed 0]    train.jsonl, test.jsonl and questions.jsonl
    python clinics.py check FOLDER/test.jsonl ANSWERS                    the number of right answers

A patient names a complaint and how bad it is. The desk's answer follows rules that all clinics share: the complaint decides the
department, how bad it is decides the day, and a child's complaint goes to paediatrics, whatever it is. Every third patient asks
a second question, whose answer the department decides. Each clinic has its own ways to say so. A few patients give a name and a
telephone number. No conversation is in both files; a seed gives the same conversations again. ANSWERS has a line for each of
questions.jsonl, as `secure-fed predict` writes them. An answer is right if it names the department and the day of the rule, and
no other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMPLAINTS = {
    "dermatology": ("a rash", "itching skin", "a mole that changed", "hair loss"),
    "cardiology": ("chest pain", "a racing heart", "swollen ankles", "high blood pressure"),
    "neurology": ("a headache", "numb fingers", "dizziness", "trembling hands"),
    "ophthalmology": ("blurred vision", "a red eye", "double vision", "dry eyes"),
    "orthopaedics": ("knee pain", "a stiff shoulder", "back pain", "a sore hip"),
    "gastroenterology": ("stomach ache", "heartburn", "nausea", "a bloated belly"),
}
BRING = {
    "dermatology": "a list of your creams",
    "cardiology": "your last ECG",
    "neurology": "a diary of the attacks",
    "ophthalmology": "your glasses",
    "orthopaedics": "comfortable shoes",
    "gastroenterology": "an empty stomach",
    "paediatrics": "the vaccination card",
}
DAYS = {
    "today": ("unbearable", "getting worse by the hour", "much worse since this morning"),
    "this week": ("there every day", "bad at night", "back since Monday"),
    "next month": ("mild", "only there now and then", "hardly noticeable"),
}
CHILD = "paediatrics"
ASKED = (
    "I have {what}; it is {how}.",
    "{What}, and it is {how}. Where do I go?",
    "Hello, I am calling about {what}. It is {how}.",
)
OF_A_CHILD = ("My son has {what}; it is {how}.", "My daughter has {what}, and it is {how}. Where do we go?")
SECOND = ("What should I bring?", "Is there anything to bring along?", "What do I need to have with me?")
CLINICS = {  # a clinic's words for a visit and for what to bring
    "Ashford": ("Please come to {where} {when}.", "Please bring {bring}."),
    "Birch Hill": ("{Where} will see you {when}.", "Bring {bring}, please."),
    "Copperfield": ("Your visit is at {where} {when}.", "You need {bring}."),
    "Dunmore": ("Go to {where} {when}.", "Have {bring} with you."),
    "Elmwood": ("We expect you at {where} {when}.", "Kindly bring {bring}."),
    "Fairview": ("Thank you. Come to {where} {when}.", "Just {bring}."),
    "Glenside": ("That is for {where}, {when}.", "It helps to bring {bring}."),
    "Harbour": ("{Where}, {when}, please.", "Do not forget {bring}."),
}
NAMES = ("Ines Okafor", "Tomas Lindqvist", "Priya Raman", "Jonas Weber", "Leila Haddad", "Marta Nowak")


def conversations(seed: int) -> Iterator[dict[str, Any]]:
    """Different conversations without end, each of a clinic at random."""
    draw, seen = random.Random(seed), set[str]()
    while True:
        child = draw.random() < 0.2
        department = draw.choice(list(COMPLAINTS))
        when = draw.choice(list(DAYS))
        what, how = draw.choice(COMPLAINTS[department]), draw.choice(DAYS[when])
        question = draw.choice(OF_A_CHILD if child else ASKED).format(what=what, What=what.capitalize(), how=how)
        if draw.random() < 0.05:
            question += f" My name is {draw.choice(NAMES)}, telephone {draw.randrange(10**6, 10**7)}."
        clinic, where = draw.choice(list(CLINICS)), CHILD if child else department
        visit, bring = CLINICS[clinic]
        if clinic + question in seen:
            continue
        seen.add(clinic + question)
        turns = [
            ("system", f"You are the desk of the {clinic} clinic."),
            ("user", question),
            ("assistant", visit.format(where=where, Where=where.capitalize(), when=when)),
        ]
        if draw.random() < 1 / 3:
            turns += [("user", draw.choice(SECOND)), ("assistant", bring.format(bring=BRING[where]))]
        messages = [{"role": role, "content": said} for role, said in turns]
        yield {"messages": messages, "clinic": clinic, "department": where, "day": when}


def named(row: dict[str, Any], answer: str) -> tuple[bool, bool]:
    """Whether an answer names the department of the row and no other, and its day and no other."""
    said = answer.lower()
    return (
        [name for name in BRING if name in said] == [row["department"]],
        [day for day in DAYS if day in said] == [row["day"]],
    )


def is_right(row: dict[str, Any], answer: str) -> bool:
    return all(named(row, answer))


def write(folder: Path, each: int, test: int, seed: int) -> None:
    """Exactly `each` conversations of every clinic to train on, and `test` others."""
    folder.mkdir(parents=True, exist_ok=True)
    every = conversations(seed)
    waiting: dict[str, list[dict[str, Any]]] = {clinic: [] for clinic in CLINICS}
    while any(len(own) < each for own in waiting.values()):
        row = next(every)
        waiting[row["clinic"]].append(row)
    train = [row for own in waiting.values() for row in own[:each]]
    held = list(itertools.islice(every, test))
    questions = [{**row, "messages": row["messages"][:2]} for row in held]
    for name, rows in (("train", train), ("test", held), ("questions", questions)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(
        f"{len(train)} conversations of {len(CLINICS)} clinics in {folder}/train.jsonl, {test} others in {folder}/test.jsonl"
    )


def check(test: Path, answers: Path) -> None:
    rows, given = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in (test, answers)
    )
    found = [named(row, one["continuation"]) for row, one in zip(rows, given, strict=True)]
    department, day = (sum(each) for each in zip(*found, strict=True))
    print(
        f"of {len(rows)} answers {department} name the right department, {day} the right day, {sum(map(all, found))} both"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    writing, checking = commands.add_parser("write"), commands.add_parser("check")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--each", type=int, default=200)
    writing.add_argument("--test", type=int, default=80)
    writing.add_argument("--seed", type=int, default=0)
    checking.add_argument("test", type=Path)
    checking.add_argument("answers", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.folder, given.each, given.test, given.seed)
    else:
        check(given.test, given.answers)


if __name__ == "__main__":
    main()
