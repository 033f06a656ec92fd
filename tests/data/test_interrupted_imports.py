"""Ctrl-C while a first read imports libraries."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import hybridmf as hmf
from support.ratings import planted

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pandas", "pyarrow")), reason="needs pandas and pyarrow"
)

READ = """
import sys
import hybridmf as hmf, hybridmf.data.arrow_text

class Interrupted:
    def find_spec(self, name, *rest):
        if name == "pandas":
            raise KeyboardInterrupt

hybridmf.data.arrow_text.SMALLEST = 0
sys.meta_path.insert(0, Interrupted())
try:
    hmf.Ratings.from_file(sys.argv[1])
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_ctrl_c_while_pandas_is_imported_is_not_lost(format, tmp_path):
    path, ratings = tmp_path / f"r.{format}", hmf.Ratings.from_matrix(planted())
    if format == "csv":
        rows = zip(*ratings.user_items.nonzero(), ratings.user_items.data, strict=True)
        path.write_text("user,item,rating\n" + "".join(f"{user},{item},{value:g}\n" for user, item, value in rows))
    else:
        ratings.to_frame(backend="pandas").to_parquet(path)
    found = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "raised", found.stderr
