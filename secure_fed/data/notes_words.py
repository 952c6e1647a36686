"""The words of the built-in notes: findings, drugs, and sentences whose word order alone decides the class.

The classes come in four pairs. The two sentences of a pair hold the same words; what differs is their order,
what is negated, or whom a finding belongs to. `{x}` is the finding spoken of, `{y}` a companion finding that
gets the other class of the pair, `{d}` a drug.
"""

from __future__ import annotations

LABELS = (
    "drug_reaction",  # the finding came after the drug
    "drug_treatment",  # the drug came after the finding
    "improving",
    "worsening",
    "confirmed",
    "excluded",
    "past_history",
    "family_history",
)

# One row per finding; a site says it with one of the words.
FINDINGS = (
    ("fever", "pyrexia"), ("cough",), ("rash", "exanthem"), ("nausea", "queasiness"), ("headache", "cephalgia"),
    ("dizziness", "vertigo"), ("breathlessness", "dyspnoea", "sob"), ("angina",), ("lumbago", "backache"),
    ("diarrhoea", "gastroenteritis"), ("vomiting", "emesis"), ("fatigue", "tiredness"), ("insomnia",),
    ("itching", "pruritus"), ("swelling", "oedema"), ("palpitations", "palps"), ("jaundice", "icterus"),
    ("anaemia",), ("wheeze", "bronchospasm"), ("tremor",), ("constipation",), ("numbness", "paraesthesia"),
    ("arthralgia",), ("confusion", "delirium"), ("hoarseness", "dysphonia"), ("cramp", "myalgia"),
)  # fmt: skip

DRUGS = (
    "penicillin", "ibuprofen", "lisinopril", "metformin", "codeine", "warfarin", "prednisolone", "amoxicillin",
    "furosemide", "digoxin", "salbutamol", "naproxen", "omeprazole", "sertraline", "simvastatin", "bisoprolol",
    "gabapentin", "tramadol", "insulin", "diazepam",
)  # fmt: skip

_CAUSE = (
    ("{x} began after {d} was started", "{d} was started after {x} began"),
    ("{d} was given before {x} appeared", "{x} appeared before {d} was given"),
    ("first {d} , then {x}", "first {x} , then {d}"),
    ("{x} followed {d}", "{d} followed {x}"),
    ("after {d} was started , {x} began", "after {x} began , {d} was started"),
    ("{d} on monday , {x} on tuesday", "{x} on monday , {d} on tuesday"),
)
_COURSE = (
    ("{x} was severe on admission and is mild now", "{x} was mild on admission and is severe now"),
    ("{x} is mild today , was severe last week", "{x} is severe today , was mild last week"),
    ("{x} went from severe to mild", "{x} went from mild to severe"),
    ("{x} severe before , mild now", "{x} mild before , severe now"),
    ("now mild , {x} was severe before", "now severe , {x} was mild before"),
    ("{x} mild after being severe", "{x} severe after being mild"),
)
# Stated once with `{x}` in the role of the pair's first class; the second class swaps `{x}` and `{y}`.
_WORKUP = (
    "{x} was found but not {y}",
    "not {y} but {x} was found",
    "tests confirmed {x} and excluded {y}",
    "tests excluded {y} and confirmed {x}",
    "{x} reported , {y} denied",
    "{y} denied , {x} reported",
    "there is {x} , no {y}",
    "no {y} , there is {x}",
)
_WHOSE = (
    "the patient once had {x} and the mother {y}",
    "the mother once had {y} and the patient {x}",
    "history : {x} in childhood , {y} in relatives",
    "history : {y} in relatives , {x} in childhood",
    "{y} runs in the family , {x} years ago",
    "{x} years ago , {y} runs in the family",
)


def _swapped(sentence: str) -> str:
    return sentence.replace("{x}", "{z}").replace("{y}", "{x}").replace("{z}", "{y}")


# FAMILIES[k] holds the sentences (for class 2k, for class 2k + 1) of the k-th pair of LABELS.
FAMILIES = (_CAUSE, _COURSE, tuple((s, _swapped(s)) for s in _WORKUP), tuple((s, _swapped(s)) for s in _WHOSE))

# A site's register: for each row it keeps one of the alternatives of the first word.
REGISTERS = (
    ("patient", "patient", "pt", "client"), ("mother", "mother", "mum", "father"), ("severe", "severe", "marked"),
    ("mild", "mild", "slight"), (" was ", " was ", " "), ("found", "found", "seen", "noted"),
    ("started", "started", "commenced", "begun"), ("given", "given", "taken", "dispensed"),
    ("before", "before", "previously"), ("years ago", "years ago", "yrs ago", "long ago"), ("tests", "tests", "labs"),
    ("admission", "admission", "adm", "arrival"), ("history", "history", "hx", "background"), (" and ", " and ", " & "),
    ("relatives", "relatives", "siblings"), ("appeared", "appeared", "arose"), ("excluded", "excluded", "dismissed"),
)  # fmt: skip

HEADERS = ("Re", "Reason for review", "Question", "Asked about", "Problem", "Subject", "Query", "Referred for", "Topic")
ASSESSMENTS = ("Assessment", "Impression", "Conclusion", "Summary", "Opinion")

# What a public note's assessment says of a finding, by class. Private notes never carry an assessment.
CONCLUSIONS = (
    ("adverse", "intolerance"), ("indication", "medicated"), ("recovering", "better"), ("deteriorating", "escalate"),
    ("established", "positive"), ("unlikely", "negative"), ("former", "remote"), ("hereditary", "inherited"),
)  # fmt: skip

FILLERS = (
    "bp {n} / 80 , pulse {m}", "sats {m} % on air", "weight {m} kg", "slept well", "eating and drinking",
    "seen on the ward round", "bloods sent", "ecg repeated", "discussed with the team", "walks with a stick",
    "lives alone", "plan : clinic in {m} days", "review by the nurse", "letter to the gp", "allergies checked",
    "mobile around the ward", "up to date with vaccines", "ct booked", "comfortable at rest", "alert and oriented",
    "referred to physio", "diet advice given", "room {n}", "works as a driver", "non smoker", "phoned on {m} may",
)  # fmt: skip

PLACES = (
    "Ashford", "Brackwater", "Cold Harbour", "Dunmere", "Eastfold", "Fairhaven", "Glenrowan", "Hollinside",
    "Inverlyn", "Jessamy", "Kestrel Bay", "Larkhill", "Millbrook", "Northgate", "Oakmoor", "Pendle Cross",
)  # fmt: skip
KINDS = ("General", "Clinic", "Infirmary")

GIVEN_NAMES = (
    "Ada", "Bruno", "Celia", "Dmitri", "Esme", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Katya", "Leif",
    "Mira", "Noor", "Otto", "Petra", "Quentin", "Rosa", "Stefan", "Thea", "Umar", "Vera", "Wanda", "Yusuf",
)  # fmt: skip
SURNAME_PARTS = (
    ("Ab", "Bren", "Cal", "Dor", "El", "Fen", "Gar", "Hal", "Is", "Jor", "Kal", "Lin", "Mor", "Nor", "Os", "Per"),
    ("a", "e", "i", "o", "u", "an", "en", "or"),
    ("dale", "feld", "gard", "ham", "kov", "lund", "mann", "neau", "quist", "ridge", "sen", "ton", "vik", "wood"),
)  # fmt: skip
