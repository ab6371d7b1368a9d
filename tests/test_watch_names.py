"""From a tensor that is kept to the program's name for it, and to the line that stores there."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.holders.keepers import named
from memfit.holders.live_tensors import live_tensors
from memfit.holders.names import Name, Roots, variables_of
from memfit.holders.referrers import holders_of
from memfit.holders.source import keeping_line


def test_looking_at_variables_keeps_nothing_alive() -> None:
    """Before Python 3.13 a frame keeps the copy of its variables that was made for who looked."""
    inner = torch.ones(3)
    last = weakref.ref(inner)
    assert variables_of(sys._getframe())["inner"] is inner
    del inner
    assert last() is None
    asked = locals()
    variables_of(sys._getframe())
    assert asked["last"] is last


SOURCE = """
def keep(out):
    kept["first"] = [out]
    kept.setdefault("a", []).append(out)
    for i in range(3):
        use(kept, kept[i])
        kept[i] = [out]
    plain.append(out)
    while out:
        plain.append(out)
    kept["two words"] = [out]
"""
KEPT = {"kept['two words'][...]": 11, "kept['a'][...]": 4, "kept[...]": 7, "kept['first'][...]": 3, "plain[...]": 10}


@pytest.mark.parametrize("path", KEPT)
def test_the_line_that_stores_under_that_key_and_in_a_loop(tmp_path: Path, path: str) -> None:
    file = tmp_path / "kept.py"
    file.write_text(SOURCE)
    assert keeping_line(Name(path, ((str(file), 2, "keep"),)))[0].endswith(f"kept.py:{KEPT[path]}")


def test_the_shortest_way_to_a_name() -> None:
    inner = torch.ones(3)
    outer = {"a": (inner,)}
    found = holders_of([inner], Roots())[0]
    assert found.path == "inner"
    del inner
    (found,) = holders_of([outer["a"][0]], Roots()).values()
    assert found.path == "outer['a'][...]"
    assert found.places[0][2] == inspect.currentframe().f_code.co_name  # type: ignore[union-attr]


class Probe:
    """What a user registers as a hook."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, _: object, __: object, out: torch.Tensor) -> None:
        self.seen.append(out.detach())


def probe() -> object:
    store: list[torch.Tensor] = []

    def hook(_: object, __: object, out: torch.Tensor) -> None:
        store.append(out.detach())

    return hook


@pytest.mark.parametrize(("make", "path"), [(Probe, "Probe.seen"), (probe, "store")])
def test_what_a_hook_keeps_is_named_by_its_own_line(make: Callable[[], Any], path: str) -> None:
    others = live_tensors()
    known = set(map(id, others))
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    model[0][0].register_forward_hook(make())
    model(torch.ones(1, 2))
    kept = [t for t in live_tensors() if id(t) not in known and t.shape == (1, 2)]
    assert len(kept) == 1
    found = holders_of(kept, Roots())[0]
    place, code = keeping_line(found)
    lines = Path(__file__).read_text().splitlines()
    assert found.path == f"{path}[...]" and code == f"{path.replace('Probe', 'self')}.append(out.detach())"
    assert lines[int(place.rpartition("test_watch_names.py:")[2]) - 1].strip() == code


def test_a_class_of_another_file_stores_into_its_own_attributes(tmp_path: Path) -> None:
    file = tmp_path / "kept_metrics.py"
    file.write_text(
        "class Metrics:\n    def __init__(self):\n        self.outputs = []\n\n"
        "    def keep(self, out):\n        self.outputs.append(out)\n"
    )
    spec = importlib.util.spec_from_file_location("kept_metrics", file)
    assert spec is not None and spec.loader is not None
    sys.modules["kept_metrics"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        named, nested = module.Metrics(), {"a": module.Metrics()}
        named.keep(torch.ones(3))
        nested["a"].keep(torch.ones(4))
        found = holders_of([named.outputs[0], nested["a"].outputs[0]], Roots())
    finally:
        del sys.modules["kept_metrics"]
    assert [found[number].path for number in (0, 1)] == ["named.outputs[...]", "nested['a'].outputs[...]"]
    assert [keeping_line(found[number])[0].rpartition("/")[2] for number in (0, 1)] == ["kept_metrics.py:6"] * 2


def test_where_no_line_stores_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kept.py"
    file.write_text("import torch\n")
    place, code = keeping_line(Name("model.0.hooks[...]", ((str(file), 0, ""),)))
    assert place.endswith("kept.py") and code == ""


def test_the_graph_behind_a_list_of_losses_keeps_what_it_saved() -> None:
    others = live_tensors()  # of other tests; kept, lest one of ours gets an identity of theirs
    known = set(map(id, others))
    weight, losses = torch.ones(64, 64, requires_grad=True), []
    for _ in range(4):
        losses.append((weight.exp().pow(2)).sum())
    (holder,) = named([t for t in live_tensors() if id(t) not in known and t.grad_fn is not None], Roots(), 4)
    assert (holder.kind, holder.name) == ("graph", "losses[...]") and holder.bytes >= 64 * 64 * 4
    assert "losses.append(" in holder.code
