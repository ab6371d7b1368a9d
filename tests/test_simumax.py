"""SimuMax's recorded ranks as jobs of a trace, and how their peaks are compared; without SimuMax and Megatron-LM."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import simumax

ROW = {"model": "llama3-70b", "parallel": "tp2cp4pp1", "layers": "12", "simumax_alloc_gib": "68.16"}
NAME = "llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc{}_cef"


@pytest.fixture
def layout(tmp_path: Path) -> simumax.Layout:
    file = tmp_path / "rows.csv"
    rows = [
        {**ROW, "case": NAME.format(count), "micro_batches": str(count), "rank": str(rank),
         "allocated_mib": "100.0", "reserved_mib": str(200 + rank)}
        for count in (32, 4) for rank in range(2)
    ]  # fmt: skip
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (found,) = simumax.read_layouts(file)
    return found


def test_cases_that_differ_in_micro_batches_are_one_layout(layout: simumax.Layout) -> None:
    assert layout.names == (NAME.format(4), NAME.format(32))
    found = layout.variables()
    assert [found[f"{name}_SIZE"] for name in ("TP", "CP", "PP", "EP")] == ["2", "4", "1", "1"]
    assert (found["GLOBAL_BATCH_SIZE"], found["SEQ_LEN"], found["NUM_LAYERS"]) == ("4", "32768", "12")
    assert "--cross-entropy-loss-fusion" in found["EXTRA_ARGS"]


def test_the_launcher_says_the_words_of_its_torchrun(layout: simumax.Layout, tmp_path: Path) -> None:
    scripts = tmp_path / "clone" / simumax.SCRIPTS / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "run_pretrain_llama3.sh").write_text(
        'export MADE_HERE=1\ntorchrun --nproc_per_node 8 x.py --tp $TP_SIZE --layers "[0] * 2"\n'
    )
    words, variables = simumax.started(layout, tmp_path / "clone", tmp_path, tmp_path)
    assert words == ["torchrun", "--nproc_per_node", "8", "x.py", "--tp", "2", "--layers", "[0] * 2"]
    assert variables["MADE_HERE"] == "1" and "PATH" not in variables
    asked = simumax.command(words)
    assert asked[asked.index("--gpu") + 1] == "8xb200" and asked[-len(words) :] == words


@pytest.mark.parametrize(("reserved", "met"), [(201, True), (203, False)])
def test_every_row_counts_for_the_bars(layout: simumax.Layout, reserved: int, met: bool) -> None:
    traced = [simumax.Traced((0, 1), 100 << 20, reserved << 20)]
    found = simumax.differences(layout, traced)
    assert [d.rank for d in found] == [0, 1] and found[0].allocated == 0
    bars = [done for _, done in simumax.judged([(layout, found)], 0)]
    assert bars == [True, met, True]
    assert not any(done for _, done in simumax.judged([], 1))
