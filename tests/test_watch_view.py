"""What a watched run looks like: in a terminal of any width, in a pipe, and as lines."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from memfit.live.watch.outputs import Live, Plain
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.sample import Alarm, Header, Leak, LeakHolder, MeterName, Sample, Watched
from memfit.nouns.tape import Phase
from memfit.report.watched_html import watched_html
from memfit.report.watching import closing_view, leak_lines, live_view, status_of
from memfit.units import GIB, KIB, MIB


def levels(reserved: int) -> Levels:
    return Levels(reserved - 2, reserved - 1, reserved, reserved + reserved // 20)


def run(meter: MeterName = "cuda", scale: int = GIB) -> Watched:
    sizes: dict[Phase, int] = {"load": 3 * scale, "first_step": 14 * scale, "step": 19 * scale}
    predicted = Footprint(tuple(PhasePeak(phase, "", levels(15 * scale), ()) for phase in sizes), "formula")
    header = Header("train.py", meter, "NVIDIA L4", 22 * scale if meter in ("cuda", "nvml") else 0, predicted=predicted)
    samples = tuple(
        Sample(9.0 * n, n, phase, levels(size // 2), levels(size)) for n, (phase, size) in enumerate(sizes.items())
    )
    leak = Leak(
        960 * KIB, 12, 19, 6 * MIB, (LeakHolder("graph", "total", "train.py:31", "total = total + loss", 7, 960 * KIB),)
    )
    alarm = Alarm("card", 2, "step", 20 * scale, 19 * scale, "92% of the card in use")
    return Watched(header, samples, (alarm,), (leak,))


def drawn(view: object, width: int, terminal: bool = True) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=terminal, color_system=None, legacy_windows=False).print(view)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("meter", ["cuda", "tensors", "nvml", "rss"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_meter_fits_any_terminal(meter: MeterName, width: int) -> None:
    watched = run(meter)
    for view in (live_view(status_of(watched)), closing_view(watched)):
        lines = drawn(view, width)
        assert max(map(len, lines)) <= width
        assert lines[0].startswith("memfit watch · train.py")
        assert any("92% of the card" in line for line in lines)


def test_the_band_is_beside_the_peaks_it_is_about() -> None:
    lines = drawn(live_view(status_of(run())), 100)
    row = {line.replace("▶", " ").strip().split("  ")[0]: line for line in lines if " to " in line and "." in line}
    assert row["load"].rstrip().endswith("below") and row["step"].rstrip().endswith("above")
    assert "14.25 to 15.75" in row["first step"]


def test_a_command_that_ended_before_it_could_be_read_is_said_to_be_unmeasured() -> None:
    nothing = levels(0)
    ended = Watched(Header("true", "rss"), (Sample(0.01, 0, "step", nothing, nothing),))
    assert any("nothing was measured" in line for line in drawn(closing_view(ended), 100))
    assert not any("nothing was measured" in line for line in drawn(closing_view(run("rss")), 100))


def test_without_a_card_nothing_is_held_against_a_prediction() -> None:
    lines = drawn(closing_view(run("tensors")), 200)
    assert not any("predicted" in line for line in lines)
    assert [line for line in lines if line.endswith("not compared with the prediction, which is for a card")] == lines[
        1:2
    ]


@pytest.mark.parametrize(("meter", "named"), [("rss", "resident memory"), ("nvml", "memory of the card")])
def test_the_picture_names_what_was_measured_from_outside(meter: MeterName, named: str) -> None:
    legend = watched_html(run(meter)).partition('class="legend"')[2].partition("</ul>")[0]
    assert named in legend and "not recorded" not in legend
    assert "reserved" not in legend  # there is no allocator whose reserve could be known


def test_an_alarm_from_outside_is_drawn_when_it_was_raised() -> None:
    """Seen from outside every step is 0, and so says nothing of the time."""
    samples = tuple(Sample(float(n), 0, "step", levels(n * GIB), levels(n * GIB)) for n in range(1, 11))
    alarm = Alarm("card", 0, "step", samples[7].peak.device, 7 * GIB, "nearly full")
    lost = Alarm("unsure", 0, "step", 0, 0, "nothing is measured from here on")
    page = watched_html(Watched(Header("train.py", "nvml", "NVIDIA L4", 10 * GIB), samples, (alarm, lost)))
    assert re.findall(r'class="alarm" x1="([\d.]+)%"', page) == ["80.00", "100.00"]


def test_small_runs_are_shown_in_mebibytes() -> None:
    lines = drawn(closing_view(run("cuda", MIB * 10)), 100)
    assert any(line.startswith("peak, MiB") for line in lines)


def test_tensors_that_were_never_counted_have_no_size() -> None:
    seen = replace(run("tensors"), alarms=(), leaks=())
    last = replace(seen.samples[-1], now=Levels(0, 0, 0, 5), peak=Levels(0, 0, 0, 21 * GIB), counted=False, every=17)
    lines = drawn(closing_view(replace(seen, samples=(*seen.samples[:-1], last))), 120)
    (row,) = (line.split() for line in lines if line.startswith("step"))
    assert row == ["step", "-", "21.00"]
    assert "tensors counted in 2 of 3 samples" in lines and any(
        line.startswith("one sample per 17 steps") for line in lines
    )
    assert not any(" samples" in line for line in drawn(closing_view(run("tensors")), 120))


def test_a_log_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\x9b2J\r"
    seen = run()
    header = replace(seen.header, name=evil, card=evil)
    holder = LeakHolder("container", evil, evil, evil, 1, 1)
    alarm = Alarm("card", 2, "step", 1, 1, evil)
    watched = Watched(header, seen.samples, (alarm,), (Leak(1, 2, 3, 4, (holder,)),))
    for view in (closing_view(watched), live_view(status_of(watched))):
        text = "".join(drawn(view, 200, terminal=False))
        assert "\N{REPLACEMENT CHARACTER}[2J" in text and not set("\x1b\x9b\r") & set(text)


def test_a_leak_shows_its_holder_and_what_to_do() -> None:
    first, second = leak_lines(run().leaks[0])
    assert first == "leak: 960 KiB more per step, 6.00 MiB over steps 12 to 19"
    assert second.startswith(
        "  held by the graph behind total (7 nodes, 960 KiB more each time) at train.py:31: total = total + loss"
    )
    assert "loss.item()" in second
    assert "not known" in leak_lines(Leak(1, 2, 3, 4))[1]


def test_plain_lines_are_whole_in_a_pipe() -> None:
    out, watched = io.StringIO(), run()
    screen = Plain(out)
    screen.show(status_of(watched))
    assert out.getvalue() == ""
    screen.alarm(watched.alarms[0])
    screen.leak(watched.leaks[0])
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and all(line.startswith("memfit watch: ") for line in lines)
    screen.close(watched)
    assert "\x1b" not in out.getvalue()


def test_the_live_picture_is_drawn_twice_a_second() -> None:
    out, now = io.StringIO(), [0.0]
    screen = Live(out, clock=lambda: now[0])
    pictures = []
    for now[0] in (0.0, 0.1, 0.2, 0.6, 0.7):
        screen.show(status_of(run()))
        pictures.append(out.getvalue().count("memfit watch"))
    screen.close(run())
    assert screen._shown == 0.6
    assert "memfit watch" in out.getvalue()
