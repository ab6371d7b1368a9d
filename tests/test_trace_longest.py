"""A script's data loader gives its longest batch, whatever comes in the steps that are traced."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from memfit import cli  # noqa: E402
from memfit.virtual.scripts.loaders import longest  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = """
import torch
from torch.utils.data import DataLoader

LENGTHS = [64] * 100
LENGTHS[LONG] = 4096
data = [torch.zeros(n, dtype=torch.long) for n in LENGTHS]
collate = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
model = torch.nn.Sequential(torch.nn.Embedding(100, 256), torch.nn.Linear(256, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(data, batch_size=2, shuffle=SHUFFLE, collate_fn=collate):
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def padded(rows: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def rows(lengths: list[int]) -> list[Any]:
    return [torch.zeros(n) for n in lengths]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_long_sample_late_in_the_data_is_met(
    shuffle: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = {}
    for place in (0, 90):
        script = tmp_path / f"train{place}.py"
        script.write_text(SCRIPT.replace("SHUFFLE", str(shuffle)).replace("LONG]", f"{place}]"))
        assert cli.main(["trace", str(script), "--gpu", "l4", "--json"]) == 0
        out, err = capsys.readouterr()
        peaks[place] = out[out.index('"peak"') :][:400]
        assert "every batch holds the longest samples of 100: 4,096 numbers, where the median has 64" in " ".join(
            err.split()
        )
    assert peaks[0] == peaks[90]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5), st.booleans())
def test_no_batch_is_longer(lengths: list[int], size: int, shuffle: bool) -> None:
    loader = DataLoader(rows(lengths), batch_size=size, shuffle=shuffle, collate_fn=padded)  # type: ignore[arg-type]
    found = longest(loader)
    assert (found is None) == (len(set(lengths)) == 1)
    if found:
        assert found.size == max(lengths[i] for i in found.samples)
        assert found.batch(loader).numel() >= max(batch.numel() for batch in loader)


def test_padded_batches_have_padding_and_packed_ones_do_not() -> None:
    data = rows([9, 9, 9, 2, 8])
    mixed = longest(DataLoader(data, batch_size=3, shuffle=True, collate_fn=padded))  # type: ignore[arg-type]
    whole = longest(DataLoader(data, batch_size=3, shuffle=True, collate_fn=torch.cat))  # type: ignore[arg-type]
    assert mixed is not None and whole is not None
    assert {len(data[i]) for i in mixed.samples} == {9, 2} and {len(data[i]) for i in whole.samples} == {9}


def test_chance_is_as_before() -> None:
    class Drawing(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            return torch.zeros(1 + int(torch.rand(1) + random.random() + numpy.random.rand()) + 2 * i)

    numpy = pytest.importorskip("numpy")
    loader = DataLoader(Drawing([0, 0, 0]), batch_size=1, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    states = random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())
    assert longest(loader) is not None
    assert (random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())) == states


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield from rows([1, 2])


class Broken(list[Any]):
    def __getitem__(self, i: Any) -> Any:
        raise RuntimeError("only once")


@pytest.mark.parametrize(
    "data", [Stream(), Broken(rows([1, 2])), rows([4, 4, 4]), []], ids=["stream", "once", "equal", "none"]
)
def test_what_cannot_be_looked_through_is_left_alone(data: Any) -> None:
    assert longest(DataLoader(data, batch_size=2)) is None


def test_samples_of_any_kind_are_measured() -> None:
    data = [{"input_ids": [1] * n, "text": "x", "label": 0} for n in (3, 30, 4)]
    found = longest(DataLoader(data, batch_size=1, collate_fn=lambda rows: rows))  # type: ignore[arg-type]
    assert found is not None and found.samples == (1,) and found.size == 32
