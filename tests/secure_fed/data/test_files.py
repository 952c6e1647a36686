import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from secure_fed.errors import DataError
from secure_fed.learning.data.files import head, read, split_files, stem

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


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_text("text,label\nhello,a\n", encoding="utf-8-sig")
    assert read(path, WANTED).columns["text"] == ["hello"]


def test_spaces_around_the_names_of_csv_columns_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "typed.csv"
    path.write_text("text , label\n hello,a\n", encoding="utf-8")
    assert read(path, WANTED).columns == {"text": [" hello"], "label": ["a"]}


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet has two columns called 'text'"):
        read(tmp_path / "x.parquet", WANTED)


def test_a_json_key_that_a_row_lacks_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"label": 1}\n', encoding="utf-8")
    assert read(path, WANTED).columns == {"text": ["a", None], "label": [None, 1]}


def test_the_head_of_json_lines_goes_as_far_as_the_wanted_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "label": 1}\nnothing that is read for its columns\n')
    assert head(path, ("text", "label"), "data.train").present == ("text", "label")
    assert head(path, ("text",), "data.train").present == ("text",)
    with pytest.raises(DataError, match="line 3 is not JSON"):
        head(path, ("text", "topic"), "data.train")


def test_a_csv_field_may_be_longer_than_the_csv_module_allows_and_its_limit_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    path = tmp_path / "x.csv"
    path.write_text("text,label\n" + "x" * 200_000 + ",a\n", encoding="utf-8")
    assert len(str(read(path, WANTED).columns["text"][0])) == 200_000
    assert csv.field_size_limit() == before


def test_stem_drops_kind_and_packing_only() -> None:
    assert stem(Path("a/site.1.csv.gz")) == "site.1"


BROKEN = {
    "half.jsonl": (b'{"text": "a", "label": 1}\n\n{"text": "b", "la', ["half.jsonl, line 3", "not JSON"]),
    "array.json": (b'[{"text": "a"}]', ["line 1", "list, not an object", "one object a line"]),
    "latin.jsonl": ('{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"), ["line 2", "0xe9", "UTF-8"]),
    "wide.csv": ("text,label\nä,b\n".encode("utf-16"), ["line 1", "0xff", "UTF-8"]),
    "quote.csv": (b'text,label\nok,a\n"open,b\n', ["quote.csv, line 3", "quotes"]),
    "commas.csv": (b"text,label\nok,a\none, two,a\n", ["line 3", "3 fields", "2 columns", "quote"]),
    "twice.jsonl": (b'{"text": "a"}\n{"text": "b", "text": "c"}\n', ["twice.jsonl, line 2", "'text'", "twice"]),
    "digits.jsonl": (b'{"text": "a", "label": ' + b"9" * 5000 + b"}\n", ["digits.jsonl, line 1", "digits"]),
    "deep.jsonl": (b'{"text": "a"}\n' + b"[" * 100_000, ["deep.jsonl, line 2", "nested too deeply"]),
    "spaced.csv": (b"text, text \nx,y\n", ["line 1", "'text' twice"]),
    "twice.csv": (b"text,label,text\nx,a,y\n", ["line 1", "'text' twice"]),
    "empty.jsonl": (b"", ["empty.jsonl is empty", "data.train"]),
    "blank.jsonl": (b"\n \n", ["blank.jsonl is empty"]),
    "empty.csv": (b"", ["empty.csv is empty"]),
    "header.csv": (b"text,label\n", ["header.csv is empty", "no example"]),
    "empty.parquet": (b"", ["empty.parquet is empty"]),
    "broken.parquet": (b"PAR1 but no more", ["broken.parquet", "Parquet"]),
    "plain.jsonl.gz": (b'{"text": "a"}\n', ["plain.jsonl.gz", "gzip"]),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 100)[:-12], ["cut.jsonl.gz", "gzip"]),
    "notes.txt": (b"hello", ["notes.txt", ".jsonl", ".csv", ".parquet", "data.train"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    content, facts = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        read(tmp_path / name, WANTED)
    for fact in facts:
        assert fact in str(refused.value)


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*gone\.csv; set data\.test"):
        read(tmp_path / "gone.csv", WANTED, "data.test")


def test_a_missing_column_is_named_with_those_there(tmp_path: Path) -> None:
    table = read(write(tmp_path / "x.csv"), WANTED)
    with pytest.raises(DataError) as refused:
        table.column("absent", "data.label")
    for fact in ("x.csv", "'absent'", "'text', 'label'", "data.label"):
        assert fact in str(refused.value)


def test_split_files_finds_shards_in_order_and_nothing_else(tmp_path: Path) -> None:
    names = ["train-00001.csv", "train-00000.csv", "test.csv", "training.csv", "train.txt"]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in split_files(tmp_path, "train")] == ["train-00000.csv", "train-00001.csv"]


def test_split_files_refuses_two_kinds(tmp_path: Path) -> None:
    for name in ("train.csv", "train.jsonl.gz"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"train\.csv, train\.jsonl\.gz"):
        split_files(tmp_path, "train")
