"""A few runs of `python benchmarks/recovery.py`: killed, starved and damaged, they end finished and exact."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import recovery

    return recovery.Bench(tmp_path_factory.mktemp("recovery"))


@pytest.mark.parametrize("seed", range(1000, 1010))
def test_a_disturbed_run_ends_finished_and_exact(bench: Any, seed: int) -> None:
    result = bench.one(seed)
    assert not result.wrong, (result.done, result.wrong)


def test_a_run_that_is_not_exact_is_found_out(bench: Any, tmp_path: Path) -> None:
    import recovery

    run = Path(shutil.copytree(bench.truths["full 4x1"], tmp_path / "run"))
    record, weights = run / "samples.jsonl", run / "output" / "model.safetensors"
    for path, changed, said in (
        (record, record.read_bytes().partition(b"\n")[2], "record lacks"),
        (weights, weights.read_bytes()[:-1] + b"\1", "other weights"),
    ):
        whole, result = path.read_bytes(), recovery.Result(0, "full 4x1")
        path.write_bytes(changed)
        bench._compare(run, result, lost=False)
        assert [said in wrong for wrong in result.wrong] == [True]
        path.write_bytes(whole)
