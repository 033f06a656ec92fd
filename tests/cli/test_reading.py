"""Options that say how a file is read, and messages in their words."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq

from support.command_line import refuse, run, succeed
from support.reading import write


def test_messages_name_options_in_place_of_arguments(tmp_path):
    twice = write(tmp_path, "user,item\na,x\na,x\n", "twice.csv")
    assert "--duplicates sum" in refuse("info", twice) and "duplicates=" not in refuse("info", twice)
    null = write(tmp_path, "user,item\nNULL,x\na,x\n", "null.csv")
    assert "--missing drop leaves" in refuse("info", null) and "--missing keep takes" in refuse("info", null)
    quoted = write(tmp_path, 'a,x,1\nb,"y,2\n', "quoted.csv")
    assert "--quote none reads" in refuse("info", quoted)
    odd = write(tmp_path, "".join(f"{u},2010-10-1{k},3,{k}\n" for u in range(3) for k in range(3)), "odd.csv")
    assert "--user 0, --item 3, --value 2, --timestamp 1" in refuse("info", odd)
    latin = write(tmp_path, "é,x,1\n", "latin.csv", encoding="latin-1")
    assert "--encoding latin-1" in refuse("info", latin)


def test_options_of_the_messages(tmp_path):
    twice = write(tmp_path, "user,item\na,x\na,x\n", "twice.csv")
    succeed("info", twice, "--duplicates", "sum")
    null = write(tmp_path, "user,item\nNULL,x\na,x\n", "null.csv")
    assert re.search(r"users\s+1\b", succeed("info", null, "--missing", "drop"))
    quoted = write(tmp_path, 'a,x,1\nb,"y,2\n', "quoted.csv")
    assert re.search(r"items\s+2\b", succeed("info", quoted, "--quote", "none"))
    lines = write(tmp_path, 'a,x,1\nb,"y\nz",2\n', "lines.csv")
    assert re.search(r"items\s+2\b", succeed("info", lines, "--quote", '"'))
    escaped = write(tmp_path, 'a,x,1\nb,"y\\",z",2\n', "escaped.csv")
    assert re.search(r"items\s+2\b", succeed("info", escaped, "--escape", "\\"))
    latin = write(tmp_path, "é,x,1\n", "latin.csv", encoding="latin-1")
    succeed("info", latin, "--encoding", "latin-1")
    odd = write(tmp_path, "".join(f"{u},2010-10-1{k},3,{k}\n" for u in range(3) for k in range(3)), "odd.csv")
    settled = ("--user", 0, "--item", 3, "--value", 2, "--timestamp", 1)
    succeed("info", odd, *settled)
    succeed("convert", odd, f"{tmp_path}/store/", *settled)


def test_a_guess_is_a_warning_in_the_words_of_the_command(tmp_path):
    result = run("info", write(tmp_path, "1,2,3\n4,5,6\n"))
    assert result.exit_code == 0 and "column 0" in result.output


def test_where_compares_numbers_as_numbers(tmp_path):
    path = write(tmp_path, "user,item,rating,kind\n1,2,3,4.0\n1,3,4,4\n2,2,5,5\n")
    assert re.search(r"users\s+1\b", succeed("info", path, "--where", "kind=4"))
    mixed = write(tmp_path, "user,item,rating,kind\n1,2,3,4\n1,3,4,x\n2,2,5,5\n", "mixed.csv")
    assert re.search(r"users\s+2\b", succeed("info", mixed, "--where", "kind=4,5"))


def test_several_files_and_patterns_are_read_as_one(tmp_path):
    folder, model = tmp_path / "logs", tmp_path / "m.safetensors"
    folder.mkdir()
    one, two = (write(folder, f"user,item\n{k},1\n{k},2\n7,{k}\n", f"{k}.csv") for k in (1, 2))
    trained = ("-o", model, "--factors", 2, "--test-size", 0, "--regularization", 0.1)
    for given in ([one, two], [folder / "*.csv"]):
        said = succeed("fit", *given, *trained)
        assert "3 users" in said and "Columns: user = column 0" in said
        assert re.search(r"users\s+3\b", succeed("convert", *given, f"{tmp_path}/store/", "--overwrite"))
        succeed("convert", *given, tmp_path / "all.csv", "--overwrite")
        succeed("evaluate", model, *given, "--metric", "rmse")
    assert re.search(r"users\s+3\b", succeed("info", tmp_path / "all.csv"))
    assert re.search(r"users\s+3\b", succeed("info", folder / "*.csv"))
    assert "no file matches the pattern" in refuse("fit", folder / "*.tsv", *trained)
    assert "does not exist" in refuse("fit", one, folder / "3.csv", *trained)
    assert "is a store, which is not read with other files" in refuse("fit", one, tmp_path / "store", *trained)


def test_no_file_of_several_is_overwritten(tmp_path):
    """A shell expands "convert *.csv" to all files, the last of which is the output."""
    one, two, three = (write(tmp_path, f"user,item\n{k},1\n", f"{k}.csv") for k in (1, 2, 3))
    assert "the last path is the output, and" in refuse("convert", one, two, three)
    assert three.read_text() == "user,item\n3,1\n"
    for output in (one, three):
        assert "is a file that is read" in refuse("convert", tmp_path / "*.csv", output)
        assert "is a file that is read" in refuse("fit", one, tmp_path / "[23].csv", "-o", output)
    assert "give a file OUT to write" in refuse("convert", one)
    assert "Missing argument" in refuse("convert")


def test_folders_of_parquet_files_are_read_as_one(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for k in range(2):
        pq.write_table(pa.table({"user": [k, 7], "item": [1, k + 1], "rating": [3.0, 4.0]}), folder / f"{k}.parquet")
    assert re.search(r"users\s+3\b", succeed("info", folder))
    assert "3 users" in succeed("fit", folder, "-o", tmp_path / "m.safetensors", "--factors", 2, "--test-size", 0)
    assert re.search(r"users\s+3\b", succeed("convert", folder, f"{tmp_path}/store/"))
    assert re.search(r"users\s+3\b", succeed("info", tmp_path / "store"))


def test_json_lines_show_their_columns(tmp_path):
    path = write(tmp_path, '{"user": 1, "item": 2, "rating": 3}\n{"user": 4, "item": 2, "rating": 3}\n', "r.jsonl")
    assert "user = column 0 'user'" in succeed("info", path)
