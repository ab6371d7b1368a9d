"""The log of a watch: what is written comes back, what was cut short or came from elsewhere is refused or left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.documents import watch_log
from memfit.errors import BadInput, Unsupported
from memfit.live.watch.outputs import Quiet
from memfit.live.watch.recorder import Recorder
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.sample import Alarm, Header, Leak, LeakHolder, Sample, Watched
from memfit.nouns.tape import PHASES

sizes = st.integers(0, 1 << 50)
levels = st.builds(Levels, sizes, sizes, sizes, sizes)
phases = st.sampled_from(PHASES)
steps = st.integers(0, 1 << 40)
resident = st.builds(Levels, st.just(0), st.just(0), st.just(0), sizes)  # where tensors were not counted
samples = st.builds(Sample, st.floats(0, 1e9), steps, phases, levels, levels) | st.builds(
    Sample, st.floats(0, 1e9), steps, phases, resident, resident, st.just(False), st.integers(1, 1000)
)
footprints = st.builds(
    Footprint, st.tuples(st.builds(PhasePeak, phases, st.text(), levels, st.just(()))), st.just("formula")
)
headers = st.builds(
    Header,
    st.text(),
    st.sampled_from(["cuda", "tensors", "nvml", "rss"]),
    st.text(),
    sizes,
    predicted=st.none() | footprints,
)
holders = st.builds(LeakHolder, st.sampled_from(["graph", "container"]), st.text(), st.text(), st.text(), sizes, sizes)
leaks = st.builds(Leak, sizes, sizes, sizes, sizes, st.lists(holders, max_size=2).map(tuple))
alarms = st.builds(
    Alarm, st.sampled_from(["card", "band", "leak", "unsure", "failed"]), sizes, phases, sizes, sizes, st.text()
)
shares = st.dictionaries(st.sampled_from(["parameters", "optimizer_states"]), sizes).map(lambda d: tuple(d.items()))
watched = st.builds(
    Watched,
    headers,
    *(st.lists(x, max_size=3).map(tuple) for x in (samples, alarms, leaks)),
    shares,  # type: ignore[attr-defined]
)


def written(run: Watched) -> bytes:
    lines = [watch_log.line(noun) for noun in (run.header, *run.samples, *run.alarms, *run.leaks)]
    return b"".join([*lines, watch_log.shares_line(run.shares)])


@given(watched)
def test_a_run_comes_back_as_it_was(run: Watched) -> None:
    content = written(run)
    assert watch_log.known(content)
    assert watch_log.loads(content) == run


@given(watched, watched)
def test_the_last_of_several_runs_counts(first: Watched, second: Watched) -> None:
    assert watch_log.loads(written(first) + written(second)) == second


def test_two_runs_that_write_at_once_are_kept_apart(tmp_path: Path) -> None:
    outside = Recorder(Header("train.py", "rss"), tmp_path / "x.jsonl", (), Quiet())
    inside = Recorder(Header("train.py", "tensors"), tmp_path / "x.jsonl", (), Quiet())
    for step in (1, 2):
        for recorder in (outside, inside):
            size = Levels(step, step, step, step + recorder.header.meter.count("s"))
            recorder.add(Sample(float(step), step, "step", size, size))
    inside.share((("parameters", 1),))
    assert list(watch_log.runs_of((tmp_path / "x.jsonl").read_bytes())) == [outside.watched(), inside.watched()]


HEAD = watch_log.line(Header("train.py", "cuda"))
SAMPLE = watch_log.line(Sample(1.0, 1, "step", Levels(1, 2, 3, 4), Levels(1, 2, 3, 4)))


def test_what_was_not_counted_is_absent() -> None:
    now = Levels(0, 0, 0, 4)
    text = watch_log.line(Sample(1.0, 1, "step", now, now, counted=False))
    assert b'"now":{"device":4},"peak":{"device":4},"counted":false' in text
    assert b"counted" not in SAMPLE  # as before there was such a key
    assert watch_log.loads(HEAD + SAMPLE).samples[0].counted


def test_every_noun_is_one_line() -> None:
    assert HEAD.count(b"\n") == SAMPLE.count(b"\n") == 1


@pytest.mark.parametrize("cut", [1, 20, len(SAMPLE) - 2])
def test_a_line_cut_short_by_a_crash_is_left_out(cut: int) -> None:
    assert len(watch_log.loads(HEAD + SAMPLE + SAMPLE[:cut]).samples) == 1


@pytest.mark.parametrize("cut", [1, 20, len(SAMPLE) - 1])
def test_a_run_after_a_line_that_was_cut_short_has_lines_of_its_own(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(HEAD + SAMPLE + SAMPLE[:cut])
    recorder = Recorder(Header("next.py", "rss"), path, (), Quiet())
    recorder.close()
    before, after = watch_log.runs_of(path.read_bytes())
    assert len(before.samples) in (1, 2) and after.header.name == "next.py"
    assert path.read_bytes().count(b"\n\n") == 0


def test_a_line_that_the_disk_had_no_room_for_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, size = Recorder(Header("train.py", "rss"), tmp_path / "x.jsonl", (), Quiet()), Levels(0, 0, 0, 1)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:30]))  # as write(2) near a full disk
    recorder.add(Sample(1.0, 0, "step", size, size))
    monkeypatch.undo()
    recorder.add(Sample(2.0, 0, "step", size, size))
    assert [s.seconds for s in watch_log.loads((tmp_path / "x.jsonl").read_bytes()).samples] == [2.0]


def test_a_run_whose_header_was_truncated_hides_no_later_one() -> None:
    later = watch_log.line(Header("later.py", "cuda"), "b") + watch_log.line(
        Sample(1.0, 1, "step", Levels(1, 2, 3, 4), Levels(1, 2, 3, 4)), "b"
    )
    (found,) = watch_log.runs_of(SAMPLE + later)
    assert found.header.name == "later.py" and len(found.samples) == 1


def test_kinds_of_later_versions_are_left_out() -> None:
    assert len(watch_log.loads(HEAD + b'{"type":"weather"}\n' + SAMPLE).samples) == 1


BAD = {
    "no watched run": b"",
    "line 2 is not valid JSON": HEAD + b"{broken\n" + SAMPLE,
    "does not begin with a header": SAMPLE,
    "line 2 has no type": HEAD + b"[1]\n",
    "line 2 is wrong": HEAD + b'{"type":"sample","seconds":"soon"}\n',
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_log_is_refused(message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        watch_log.loads(BAD[message])
    assert caught.value.hint


def test_another_version_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"memfit\.watch/1"):
        watch_log.loads(HEAD.replace(b"watch/1", b"watch/2"))


@given(st.binary(max_size=300))
def test_no_bytes_whatever_are_a_bug(content: bytes) -> None:
    for text in (content, HEAD + content):
        try:
            watch_log.loads(text)
        except BadInput as error:
            assert error.hint
