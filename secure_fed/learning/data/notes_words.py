"""The words of the built-in notes: findings, drugs, and sentences whose word order alone decides the class.

The classes come in four pairs. The two sentences of a pair have the same words and differ only in their order,
or in the word after "not". `{x}` is a finding, `{d}` a drug.
"""

from __future__ import annotations

LABELS = (
    "drug_reaction",  # the finding came after the drug
    "drug_treatment",  # the drug came after the finding
    "improving",
    "worsening",
    "confirmed",
    "excluded",
    "own_condition",
    "family_condition",
)

# One row per finding; a site uses one of the words.
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

# FAMILIES[k] has the sentences (for class 2k, for class 2k + 1) of the k-th pair of LABELS.
FAMILIES = (
    (
        ("{x} began after {d} was started", "{d} was started after {x} began"),
        ("{d} was given before {x} appeared", "{x} appeared before {d} was given"),
        ("first {d} , then {x}", "first {x} , then {d}"),
        ("{x} followed {d}", "{d} followed {x}"),
        ("after {d} was started , {x} began", "after {x} began , {d} was started"),
        ("{d} on monday , {x} on tuesday", "{x} on monday , {d} on tuesday"),
    ),
    (
        ("{x} was severe on admission and is mild", "{x} was mild on admission and is severe"),
        ("{x} is mild , was severe at first", "{x} is severe , was mild at first"),
        ("{x} went from severe to mild", "{x} went from mild to severe"),
        ("{x} severe before , then mild", "{x} mild before , then severe"),
        ("{x} mild after being severe", "{x} severe after being mild"),
        ("from severe , {x} went to mild", "from mild , {x} went to severe"),
    ),
    (
        ("{x} is confirmed , not excluded", "{x} is excluded , not confirmed"),
        ("{x} not excluded but confirmed", "{x} not confirmed but excluded"),
        ("first excluded , {x} was then confirmed", "first confirmed , {x} was then excluded"),
        ("{x} thought absent , found present", "{x} thought present , found absent"),
        ("{x} is present and not absent", "{x} is absent and not present"),
        ("tests found {x} present , not absent", "tests found {x} absent , not present"),
    ),
    (
        ("the patient has {x} , not the mother", "the mother has {x} , not the patient"),
        ("not the mother but the patient has {x}", "not the patient but the mother has {x}"),
        ("{x} in the patient , not in relatives", "{x} in relatives , not in the patient"),
        ("the mother never had {x} , the patient did", "the patient never had {x} , the mother did"),
        ("{x} affects the patient and not relatives", "{x} affects relatives and not the patient"),
        ("{x} : patient yes , mother no", "{x} : mother yes , patient no"),
    ),
)

# A site's register: in each row it uses one of the alternatives for the first word.
REGISTERS = (
    ("patient", "patient", "pt", "client"), ("mother", "mother", "mum", "father"), ("severe", "severe", "marked"),
    ("mild", "mild", "slight"), (" was ", " was ", " "), (" is ", " is ", " "), ("relatives", "relatives", "siblings"),
    ("started", "started", "commenced", "begun"), ("given", "given", "taken", "dispensed"),
    ("tests", "tests", "labs"), ("admission", "admission", "adm", "arrival"),
    (" and ", " and ", " & "), ("appeared", "appeared", "arose"), ("excluded", "excluded", "refuted"),
)  # fmt: skip

# How a site marks the entry of this visit, and entries copied from older notes.
CURRENT = ("today", "this visit", "new entry", "current", "this week")
OLDER = ("last year", "previous visit", "earlier entry", "old letter", "last month", "copied", "archive")

# A public note's conclusion from an entry, by class. Private notes never have a conclusion.
CONCLUSIONS = (
    ("adverse", "intolerance"), ("indication", "medicated"), ("recovering", "better"), ("deteriorating", "escalate"),
    ("established", "positive"), ("unlikely", "negative"), ("affected", "personal"), ("hereditary", "inherited"),
)  # fmt: skip

# The subject of this visit in the title of a public note, by pair of classes.
SUBJECTS = (("medication", "pharmacy"), ("progress", "trend"), ("diagnosis", "result"), ("kin", "household"))

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
