"""The convergence lab under an operator's mistakes: results that are none, a full disk, other labs, wrong arguments."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from tests.bench.convergence import results
from tests.bench.convergence.__main__ import main
from tests.bench.convergence.page import BYTES, TABLE, check_page, fill
from tests.bench.convergence.report import render
from tests.bench.convergence.results import Point, Result, ResultStore, _held, _write, run_key
from tests.bench.convergence.running import run_all
from tests.bench.convergence.variant import Density, Variant
from tests.bench.convergence.variants import Question
from tscale.protocol.errors import BadInput, DiskFull

SMALL = Variant("small", steps=(2, 2), preset="nano", context=16, tokens=768)
OTHER = replace(SMALL, name="other", rho=0.0)
CODE = "0" * 8


def result_of(variant: Variant, loss: float = 2.0) -> Result:
    curve = (Point(0, 0, 0.0, 5.0), Point(3, 768, 8e6, loss))
    run = run_key(variant)
    return Result(variant.plain, run, CODE, "2026-01-01T00:00:00", 1.0, 5, 3, 768, 768, 0.5, 0, 0.1, loss, curve)


def damaged() -> dict[str, str]:
    plain = asdict(result_of(SMALL))
    others = [{"loss": "2.0"}, {"curve": []}, {"new": 1}, {"code": "1" * 8}, {"curve": [{"round": 1}]}]
    changed = {str(other): json.dumps({**plain, **other}) for other in others}
    return {"empty": "", "cut off": "{", "list": "[]", "null": "null", "deep": "[" * 100_000, **changed}


@pytest.mark.parametrize("text", damaged().values(), ids=damaged().keys())
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / f"2026-01-01-{run_key(SMALL)}-{CODE}.json"
    path.write_text(text)
    (tmp_path / "notes.json").write_text("not ours")
    for look in (ResultStore(tmp_path).check, partial(ResultStore(tmp_path).find, SMALL, None)):
        with pytest.raises(BadInput, match=f"{path.name} is no result of this lab") as told:
            look()
        assert "\n" not in str(told.value)
    path.unlink()
    ResultStore(tmp_path).check()


def test_a_run_that_another_lab_does_is_left_to_it(tmp_path: Path) -> None:
    store, work = ResultStore(tmp_path), partial(result_of, SMALL)
    with _held(tmp_path / f"{run_key(SMALL)}-{CODE}.part") as ours:
        assert ours and store.keep(SMALL, CODE, work) is None
    assert not list(tmp_path.iterdir())
    assert store.keep(SMALL, CODE, work) == work()
    assert store.keep(SMALL, CODE, partial(result_of, SMALL, 9.0)) is None and store.find(SMALL, CODE) == work()


def test_what_an_ended_lab_left_is_taken_away_but_not_what_a_living_one_holds(tmp_path: Path) -> None:
    (tmp_path / "left.part").write_text("half of a resu")
    with _held(tmp_path / "held.part"):
        ResultStore(tmp_path).make_ready()
        assert [path.name for path in tmp_path.iterdir()] == ["held.part"]


def test_a_full_disk_is_told_before_the_work_or_leaves_no_half_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / f"{run_key(SMALL)}-{CODE}.part"
    worked = []

    def work() -> Result:
        worked.append(True)
        part.unlink()
        part.symlink_to("/dev/full")
        return result_of(SMALL)

    with pytest.raises(DiskFull, match="No space left"):
        ResultStore(tmp_path).keep(SMALL, CODE, work)
    assert worked == [True] and not list(tmp_path.iterdir())
    monkeypatch.setattr(results, "_write", lambda path, data: _write(Path("/dev/full"), data))
    with pytest.raises(DiskFull, match="No space left"):
        ResultStore(tmp_path).keep(SMALL, CODE, work)
    assert worked == [True] and not list(tmp_path.iterdir())


def test_a_run_that_raises_is_told_and_the_others_are_run(tmp_path: Path) -> None:
    store, said = ResultStore(tmp_path), list[str]()
    wrong = replace(SMALL, name="wrong", densities=(Density(0),))
    assert run_all([wrong, SMALL], store, 1, said.append) == 1
    assert "wrong, seed 1: failed" in said[0] and "Error" in said[0]
    (path,) = tmp_path.iterdir()
    assert run_key(SMALL) in path.name


def test_runs_that_diverged_are_counted_and_not_compared(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    for variant, losses in ((SMALL, (2.0, 3.0)), (OTHER, (float("inf"), float("inf")))):
        for seed, loss in enumerate(losses, start=1):
            store.keep(variant.seeded(seed), CODE, partial(result_of, variant.seeded(seed), loss))
    for against in (SMALL, OTHER):
        text = render([Question("Q", against.name, (SMALL, OTHER), (1, 2))], store, None)
        assert "| 2 of 2 diverged |  | 2 |" in text and "| 2.500 ± 0.707 |  | 2 |" in text


@pytest.mark.parametrize("text", ["", TABLE[0], f"{TABLE[1]}\n{TABLE[0]}", f"{TABLE[0]}{TABLE[1]}{TABLE[0]}"])
def test_a_page_without_a_place_for_the_table_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(BadInput, match="no place for the table"):
        check_page(page)


def test_a_page_keeps_what_is_outside_of_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"± a\n{BYTES[0]}\n{BYTES[1]}\nb\n{TABLE[0]}\nold\n{TABLE[1]}\nc\n", encoding="utf-8")
    check_page(page)
    fill(page, TABLE, "new")
    text = page.read_text(encoding="utf-8")
    assert text == f"± a\n{BYTES[0]}\n{BYTES[1]}\nb\n{TABLE[0]}\nnew\n{TABLE[1]}\nc\n"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    "wrong", [["--seeds", "a"], ["--seeds", "1,"], ["--match", "["], ["--jobs", "0"], ["--jobs", "-1"]]
)
def test_a_wrong_argument_is_refused_by_its_name(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["quick", *wrong])
    assert f"argument {wrong[0]}: '{wrong[1]}' is no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--seeds", "9"], "has the seeds 1 only"),
        (["--match", "no such"], "has no run with these seeds"),
        (["--page", "no-such-page.md"], "can't read no-such-page.md"),
        (["--results", __file__], "is no folder"),
        (["--results", f"{__file__}/x"], "can't write results"),
    ],
)
def test_what_can_not_be_done_is_one_line_before_anything_runs(
    wrong: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quick", "--results", str(tmp_path), *wrong]) == 2
    out, err = capsys.readouterr()
    assert told in err and err.count("\n") == 1 and not out


def test_without_results_there_is_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quick", "--results", str(tmp_path / "none"), "--render-only"]) == 0
    assert "no results yet" in capsys.readouterr().out
