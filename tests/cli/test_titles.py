"""Titles of items from files."""

from __future__ import annotations

import gzip

import pytest

from hybridmf.cli.titles import read_titles
from support.command_line import refuse, succeed

# --------------------------------------------------------------------------------------------------------- titles

TITLES = {
    "movies.dat": ("1::Amélie (2001)::Comedy|Romance\n2::A | B, C: D\n".encode("latin-1"), "A | B, C: D"),
    "u.item": ("1|Amélie (2001)|01-Jan-2001||http://x/?a::b|0\n2|A, B|\n".encode("latin-1"), "A, B"),
    "movies.csv": ('\ufeffmovieId,title,genres\n1,Amélie (2001),A|B\n2,"A, ""B""",C\n'.encode(), 'A, "B"'),
    "bare.csv": ("1,Amélie (2001),A|B\n2,B,C|D".encode(), "B"),
    "semicolons.csv": ('"1";"Amélie (2001)"\r\n"2";"A; B"\r\n'.encode(), "A; B"),
    "artists.tsv": ('id\tname\turl\n1\tAmélie (2001)\tu\n2\t"Al" B, C "D\tu\n\n'.encode(), '"Al" B, C "D'),
    "artists.tsv.gz": (gzip.compress("1\tAmélie (2001)\n2\tB\n".encode()), "B"),
    "no_newline_inside": ("1|Amélie (2001)\n2|A\x85B\x0cC\n".encode("latin-1"), "A\x85B\x0cC"),
}


@pytest.mark.parametrize("name", TITLES)
def test_titles_are_read(tmp_path, name):
    content, second = TITLES[name]
    (tmp_path / name).write_bytes(content)
    titles = read_titles(str(tmp_path / name))
    assert titles["1"] == "Amélie (2001)"
    assert titles["2"] == second
    assert len(titles) <= 3  # perhaps a header


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", [], "is empty"),
        (b"\n \n", [], "is empty"),
        (b"1 A Title\n", [], "has no separator"),
        (b"1,A Title\n2\n", [], "entry 2 ('2') has no title"),
        (b"1,A Title\n", ["--titles-separator", "::"], "entry 1 ('1,A Title') has no title after the separator '::'"),
        (b"1\tA\n", ["--titles-separator", ","], "has no title"),
        (b"1,Am\xe9lie\n", ["--titles-encoding", "utf-8"], "line 1 is not valid utf-8"),
        (b"1,A\n", ["--titles-encoding", "klingon"], "--titles-encoding: unknown encoding: klingon"),
        (gzip.compress(b"1,A Title\n", mtime=0)[:-10], [], "truncated"),
        (b'1,"' + b"x" * 200_000, [], "cannot be read as CSV"),
    ],
)
def test_titles_are_refused(folder, tmp_path, content, options, message):
    file = tmp_path / "titles"
    file.write_bytes(content)
    arguments = ["recommend", folder / "model.safetensors", "--user", "u1", "--titles", file]
    assert message in refuse(*arguments, *options)


def test_titles_take_a_spelled_out_tab_and_an_encoding(folder, tmp_path):
    file = tmp_path / "titles"
    file.write_bytes("a,m1\tA €\n".encode("cp1252"))
    titles = read_titles(str(file), "\t", "cp1252")
    assert titles == {"a,m1": "A €"}
    for tab in ("tab", "\\t"):
        succeed(
            "recommend", folder / "model.safetensors", "--user", "u1", "--titles", file,
            "--titles-separator", tab, "--titles-encoding", "cp1252",
        )  # fmt: skip
