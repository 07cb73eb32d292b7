"""What the README and the examples' page show: pieces of Python run, each alone, and print what is written."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from support import ON_GPU

import burt_numba
from burt_numba.host import errors

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PIECES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def kept_policy():
    before = errors._policy
    yield
    # On a GPU, events are reported by a later call, which a piece need not make.
    burt_numba.set_error_policy("ignore")
    burt_numba.check()
    burt_numba.set_error_policy(before)


@pytest.mark.parametrize("piece", PIECES, ids=range(len(PIECES)))
def test_a_piece_of_the_readme_runs_alone(piece, capsys):
    for library in ("torch", "cupy"):
        if f"import {library}" in piece:
            if not ON_GPU:
                pytest.skip(f"arrays of {library} on a GPU")
            pytest.importorskip(library)
    exec(compile(piece, "README.md", "exec"), {"__name__": "piece"})
    written = re.findall(r"^print\(.*\)  # (.*)$", piece, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == written


def test_the_readme_has_pieces_for_numpy():
    assert sum("torch" not in piece and "cupy" not in piece for piece in PIECES) >= 6


def test_the_routing_example_prints_what_its_page_shows(monkeypatch, capsys):
    pytest.importorskip("scipy")
    monkeypatch.setattr(sys, "argv", ["expert_routing.py"])
    runpy.run_path(str(ROOT / "examples" / "expert_routing.py"), run_name="__main__")
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8").splitlines()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7
    for line in printed:
        assert f"    {line}" in page
