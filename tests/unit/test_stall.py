"""The stall benchmark's arithmetic; what it measures is for a person to look at."""

from __future__ import annotations

import os

import pytest

from benchmarks import stall
from kvshare.errors import LocalProtocolError, RemoteProtocolError

# a token every 10 ms up to 0.1 s, a stall of 200 ms, then every 20 ms
TIMES = [i / 100 for i in range(11)] + [0.3 + i / 50 for i in range(11)]


def test_gaps_count_if_their_middle_is_in_the_window() -> None:
    times = [0.0, 1.0, 2.0, 4.0, 5.0]
    assert stall.gaps(times, 1.4, 4.5) == [(1.0, 1000.0), (2.0, 2000.0), (4.0, 1000.0)]
    assert stall.gaps(times, 1.6, 4.4) == [(2.0, 2000.0)]
    assert stall.gaps(times, 3.1, 4.4) == []


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (50, 50), (98.5, 99), (99, 99), (99.5, 100), (100, 100)]
)
def test_percentile_is_the_nearest_rank(percent: float, expected: int) -> None:
    assert stall.percentile([*range(100, 0, -1)], percent) == expected


def test_percentile_of_few_values_is_the_largest() -> None:
    assert stall.percentile([3.0, 1.0, 2.0], 99) == 3.0


def test_a_run_is_evaluated_in_its_window() -> None:
    run = stall.Run.of(TIMES, arrival=0.083, first=0.405, last=0.45)
    assert run.max_gap_ms == pytest.approx(200)
    assert run.max_gap_at_ms == pytest.approx(17)
    assert run.p99_gap_ms == run.max_gap_ms
    # 80-90, 90-100, 100-300, and five of 20 up to 400; the next one is the first of both
    assert run.n_gaps == 8
    assert [run.median_gap_ms, run.late_gap_ms, run.both_gap_ms] == pytest.approx([20, 20, 20])
    assert run.idle_gap_ms == pytest.approx(10)
    assert run.idle_max_gap_ms == pytest.approx(10)
    assert run.ttft_ms == pytest.approx(322)


def test_the_late_gap_is_that_of_the_end() -> None:
    times = [i / 100 for i in range(100)] + [1 + i / 20 for i in range(31)]
    run = stall.Run.of(times, arrival=0.5, first=2.01, last=2.1)
    assert run.median_gap_ms == pytest.approx(10)
    assert run.late_gap_ms == pytest.approx(50)


def test_a_stall_counts_whole_where_it_begins_before_the_prompt_or_ends_behind_its_answer() -> None:
    assert stall.Run.of(TIMES, arrival=0.15, first=0.33, last=0.4).max_gap_ms == pytest.approx(200)
    assert stall.Run.of(TIMES, arrival=0.05, first=0.25, last=0.4).max_gap_ms == pytest.approx(200)


@pytest.mark.parametrize(
    ("arrival", "first", "last"),
    [(0.004, 0.3, 0.4), (0.2, 0.4, 0.5), (0.2, 0.4, 0.6), (0.2, 0.3, 0.305), (-1.0, 0.2, 0.4)],
)
def test_a_stream_that_did_not_run_throughout_is_refused(arrival: float, first: float, last: float) -> None:
    with pytest.raises(RemoteProtocolError):
        stall.Run.of(TIMES, arrival, first, last)
    with pytest.raises(RemoteProtocolError):
        stall.Run.of([], arrival, first, last)


def test_summary_has_medians_spread_and_ratio() -> None:
    def run(gap: float) -> stall.Run:
        return stall.Run(gap, gap, 1, 1, 1, 1, 1, 1, 1, 1)

    report = stall.summary({"stock": [run(900), run(1000), run(5000)], "kvshare": [run(40), run(60)]})
    assert report["stock"]["max_gap_ms"] == 1000
    assert report["stock"]["spread"]["max_gap_ms"] == [900, 5000]
    assert report["kvshare"]["max_gap_ms"] == 50
    assert report["kvshare"]["repetitions"] == len(report["kvshare"]["runs"]) == 2
    assert report["ratio_max_gap"] == 20
    assert {"max_gap_ms", "p99_gap_ms", "ttft_ms"} <= report["stock"].keys()


def test_cores_stay_whole() -> None:
    assert stall.split([{0}, {1}]) == ([0], [1])
    assert stall.split([{3, 1}, {0, 2}]) == ([0, 2], [1, 3])
    assert stall.split([{4}, {0}, {2}]) == ([0], [2, 4])
    assert stall.split([{0, 1}]) == ([0], [1])


@pytest.mark.parametrize("cores", [[{3}], [{0}]])
def test_one_cpu_is_said_to_be_too_few(cores: list[set[int]]) -> None:
    with pytest.raises(LocalProtocolError, match="one CPU only"):
        stall.split(cores)


def test_usable_cores_are_those_of_this_process() -> None:
    cores = stall.usable_cores()
    assert set().union(*cores) == os.sched_getaffinity(0)
    assert sum(map(len, cores)) == len(os.sched_getaffinity(0))


def test_pinning_ends_with_its_block() -> None:
    before = os.sched_getaffinity(0)
    with stall.pinned({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_on_one_cpu_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with stall.pinned({min(os.sched_getaffinity(0))}):
        assert stall.main(["--json"]) == LocalProtocolError.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "one CPU only" in captured.err


@pytest.mark.parametrize("argv", [["--tokens", "10"], ["--repetitions", "0"], ["--tokens", "many"]])
def test_bad_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stall.main(argv)
    assert "--" in capsys.readouterr().err
