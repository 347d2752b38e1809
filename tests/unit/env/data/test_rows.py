"""Rows from every kind of source, and errors that name the file and the line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.env.data import rows as dataset_rows
from gspo_gym.env.data.rows import read_rows
from gspo_gym.errors import ConfigError, MissingExtraError, UnknownNameError

TWO = [{"question": "2+2?", "answer": "4"}, {"question": "Capital of France?", "answer": "Paris"}]


def values(source: Any) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(source)]


def test_a_line_of_json_lines_is_a_row_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(TWO[0])}\n\n{json.dumps(TWO[1])}\n")
    rows = read_rows(path)
    assert [dict(row.values) for row in rows] == TWO
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:3"]


def test_a_line_separator_of_unicode_inside_json_is_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a\u2028b"}\n', encoding="utf-8")
    assert values(path) == [{"question": "a\u2028b"}]


def test_json_and_csv_files_are_read_by_their_suffix(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(TWO))
    (tmp_path / "rows.csv").write_text('\ufeffquestion,answer\n2+2?,4\n"Capital of\nFrance?",Paris\n', encoding="utf-8")
    assert values(tmp_path / "rows.json") == TWO
    rows = read_rows(str(tmp_path / "rows.csv"))
    assert [dict(row.values) for row in rows] == [TWO[0], {"question": "Capital of\nFrance?", "answer": "Paris"}]
    assert [row.where for row in rows] == [f"{tmp_path}/rows.csv:2", f"{tmp_path}/rows.csv:4"]  # where the row ends


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json", "rows.csv"])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path: Path, name: str) -> None:
    texts = {".json": json.dumps(TWO), ".csv": "question,answer\n2+2?,4\nCapital of France?,Paris\n"}
    text = texts.get(Path(name).suffix, "\n".join(map(json.dumps, TWO)))
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert (tmp_path / name).read_bytes().startswith(b"\xef\xbb\xbf")
    assert values(tmp_path / name) == TWO


def test_a_csv_cell_may_be_a_long_document(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)  # Python's own
    document = "word, " * 50_000  # 300,000 characters
    (tmp_path / "rows.csv").write_text(f'question,answer\n"{document}",4\n')
    assert values(tmp_path / "rows.csv") == [{"question": document, "answer": "4"}]


@pytest.mark.parametrize("spelling", ['"\\ud800"', '{"choices": ["a", "b\\udfff"]}', '{"\\ud800": 1}'])
def test_a_row_with_a_lone_surrogate_is_refused_where_it_is_read(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"question": "x"}}\n{{"question": {spelling}}}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:2: expected text that can be encoded, got a lone surrogate"):
        read_rows(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"rows\[0\]: expected text that can be encoded"):
        read_rows([{"question": json.loads(spelling)}])
    (tmp_path / "pair.jsonl").write_text('{"question": "\\ud83d\\ude00"}')
    assert values(tmp_path / "pair.jsonl") == [{"question": "\U0001f600"}]


def test_rows_in_memory_may_come_from_any_iterable() -> None:
    assert values(iter(TWO)) == TWO
    assert [row.where for row in read_rows(TWO)] == ["rows[0]", "rows[1]"]


def test_a_name_in_a_module_gives_rows_or_a_function_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows_for_test.py").write_text(f"ROWS = {TWO}\ndef make():\n    return iter(ROWS)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert values("my_rows_for_test:ROWS") == values("my_rows_for_test:make") == TWO
    with pytest.raises(UnknownNameError, match="my_rows_for_test has no 'ROW'; did you mean 'ROWS'"):
        read_rows("my_rows_for_test:ROW")
    with pytest.raises(UnknownNameError, match="rows 'my_row:ROWS': cannot import 'my_row'"):
        read_rows("my_row:ROWS")


def test_parquet_arrow_saved_folders_and_loaded_sets_give_the_same_rows(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    whole = Dataset.from_list(TWO)
    whole.to_parquet(str(tmp_path / "rows.parquet"))
    whole.save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    assert values(tmp_path / "rows.parquet") == values(tmp_path / "saved") == values(arrow) == values(whole) == TWO
    DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match=r"choose one of its splits \['train', 'test'\]"):
        read_rows(tmp_path / "both")
    assert values(tmp_path / "both" / "test") == TWO


def test_a_hub_id_is_loaded_with_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Package:
        @staticmethod
        def load_dataset(path: str, **settings: str) -> list[dict[str, str]]:
            asked.append((path, settings))
            if path == "gone":
                raise ValueError("no such split")
            return TWO

    monkeypatch.setattr(dataset_rows, "_datasets_package", lambda: Package)
    assert values("hub:openai/gsm8k?name=main&split=test") == TWO
    assert values("hub:squad") == TWO
    assert asked == [("openai/gsm8k", {"name": "main", "split": "test"}), ("squad", {"split": "train"})]
    with pytest.raises(ConfigError, match="unknown key 'splt'; did you mean 'split'"):
        read_rows("hub:squad?splt=test")
    with pytest.raises(ConfigError, match="'hub:gone' cannot be loaded: no such split"):
        read_rows("hub:gone")


def test_without_the_datasets_package_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # importing it then raises ImportError
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[datasets\]'"):
        read_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"question": "x"}\n{"question": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", "[1]\n", r"a.jsonl:1: expected columns by name, got \[1\]"),
        ("a.json", '{"question": "x"}', "a.json: expected a JSON list of objects, got dict; one a line is .jsonl"),
        ("a.csv", "question,answer\nx,1\ny,2,3\n", "a.csv:3: expected 2 columns, got more"),
        ("a.csv", 'question,answer\n"x,1\n', "a.csv: not CSV after line 1: unexpected end of data"),
        ("a.json", "[" * 100_000, "a.json: not JSON"),
        ("a.parquet", "no parquet", "a.parquet cannot be read"),
    ],
)
def test_a_damaged_file_is_named_with_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path / name)


def test_what_is_no_source_is_refused_with_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"there is no file .*tran.jsonl; did you mean '.*train.jsonl'"):
        read_rows(tmp_path / "tran.jsonl")
    with pytest.raises(ConfigError, match="got 'openai/gsm8k', which is no file or folder here"):
        read_rows("openai/gsm8k")
    with pytest.raises(ConfigError, match=r"rows: expected rows, .* got dict; choose one of its splits \['train'\]"):
        read_rows({"train": TWO})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is no folder of Dataset\.save_to_disk"):
        read_rows(tmp_path)
