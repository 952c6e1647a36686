import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from secure_fed.errors import DataError
from secure_fed.learning.data.files import head, read, split_files, stem
from tests.golden import refused

ROWS = [
    {"text": "first, with a comma", "label": "a"},
    {"text": "zwei\nZeilen „ü“", "label": "b"},
    {"text": 'a "quote"', "label": "a"},
]
WANTED = ("text", "label", "absent")


def write(path: Path) -> Path:
    """Writes ROWS in the format that the ending of `path` names, and returns `path`."""
    opened = gzip.open if path.suffix == ".gz" else open
    plain = path.name.removesuffix(".gz")
    if plain.endswith(".parquet"):
        with opened(path, "wb") as file:
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    elif plain.endswith((".csv", ".tsv")):
        with opened(path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"], delimiter="\t" if "tsv" in plain else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        with opened(path, "wt", encoding="utf-8") as file:
            file.write("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS))
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_every_kind_of_file_gives_the_same_columns(tmp_path: Path, kind: str, packed: str) -> None:
    table = read(write(tmp_path / f"train.{kind}{packed}"), WANTED)
    assert table.columns == {name: [row[name] for row in ROWS] for name in ("text", "label")}
    assert table.present == head(tmp_path / f"train.{kind}{packed}", WANTED, "data.train").present == ("text", "label")
    assert len(table) == 3


@pytest.mark.parametrize(("name", "place"), [("x.jsonl", "line 5"), ("x.csv", "line 5"), ("x.parquet", "row 3")])
def test_a_row_knows_where_it_starts(tmp_path: Path, name: str, place: str) -> None:
    path = write(tmp_path / name)  # blank lines between JSON rows, a line break inside a CSV field
    assert read(path, WANTED).place(2) == f"{path}, {place}"


def test_json_lines_may_lack_keys_and_their_head_goes_as_far_as_the_wanted_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"label": 1}\n', encoding="utf-8")
    assert read(path, WANTED).columns == {"text": ["a", None], "label": [None, 1]}
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "label": 1}\nnothing that is read for its columns\n')
    assert head(path, ("text", "label"), "data.train").present == ("text", "label")
    assert head(path, ("text",), "data.train").present == ("text",)
    with refused(DataError):
        head(path, ("text", "topic"), "data.train")


@pytest.mark.parametrize(
    ("names", "present"),
    [("text;label", ("text", "label")), ("text;note,label", ("text;note", "label")), ("text", ("text",))],
)
def test_semicolons_divide_a_csv_whose_first_line_has_no_comma(
    names: str, present: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(names + "\n" + names.replace("text", '"a, b; c"').replace("label", "1") + "\n", encoding="utf-8")
    assert head(path, (), "data.train").present == present
    if present == ("text", "label"):
        assert read(path, WANTED).columns == {"text": ["a, b; c"], "label": ["1"]}


BROKEN = {
    "half.jsonl": b'{"text": "a", "label": 1}\n\n{"text": "b", "la',
    "array.json": b'[{"text": "a"}]',
    "latin.jsonl": '{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"),
    "wide.csv": "text,label\nä,b\n".encode("utf-16"),
    "quote.csv": b'text,label\nok,a\n"open,b\n',
    "commas.csv": b"text,label\nok,a\none, two,a\n",
    "twice.jsonl": b'{"text": "a"}\n{"text": "b", "text": "c"}\n',
    "digits.jsonl": b'{"text": "a", "label": ' + b"9" * 5000 + b"}\n",
    "deep.jsonl": b'{"text": "a"}\n' + b"[" * 100_000,
    "spaced.csv": b"text, text \nx,y\n",
    "twice.csv": b"text,label,text\nx,a,y\n",
    "empty.jsonl": b"",
    "blank.jsonl": b"\n \n",
    "empty.csv": b"",
    "header.csv": b"text,label\n",
    "empty.parquet": b"",
    "broken.parquet": b"PAR1 but no more",
    "plain.jsonl.gz": b'{"text": "a"}\n',
    "cut.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 100)[:-12],
    "notes.txt": b"hello",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    with refused(DataError, hide=r"(?<=file )\(.*\)(?=:)"):  # a library's words
        read(tmp_path / name, WANTED)


def test_csv_names_have_no_byte_order_mark_and_no_spaces_and_fields_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "typed.csv"
    path.write_text("text , label\n hello,a\n", encoding="utf-8-sig")
    assert read(path, WANTED).columns == {"text": [" hello"], "label": ["a"]}
    before = csv.field_size_limit()
    path = tmp_path / "x.csv"
    path.write_text("text,label\n" + "x" * 200_000 + ",a\n", encoding="utf-8")
    assert len(str(read(path, WANTED).columns["text"][0])) == 200_000
    assert csv.field_size_limit() == before


def test_what_is_not_there_or_there_twice(tmp_path: Path) -> None:
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), tmp_path / "x.parquet")
    with refused(DataError):
        read(tmp_path / "x.parquet", WANTED)
    with refused(DataError):
        read(tmp_path / "gone.csv", WANTED, "data.test")
    with refused(DataError):
        read(write(tmp_path / "x.csv"), WANTED).column("absent", "data.label")


def test_split_files_finds_shards_of_one_kind_in_order_and_nothing_else(tmp_path: Path) -> None:
    for name in ("train-00001.csv", "train-00000.csv", "test.csv", "training.csv", "train.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in split_files(tmp_path, "train")] == ["train-00000.csv", "train-00001.csv"]
    assert stem(Path("a/site.1.csv.gz")) == "site.1"
    (tmp_path / "train.jsonl.gz").touch()
    with refused(DataError):
        split_files(tmp_path, "train")
