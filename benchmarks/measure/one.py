"""Run one case, on the real card or on a virtual one like it, and print its peaks by instant as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")


class Stopwatch:
    """Reads the peaks of every instant from torch.cuda, with the same hooks on a real and on a virtual card."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.done, self._depth, self._busy = 0, 0, False
        self._now = ("load", "load")

    @property
    def phase(self) -> str:
        """Return the phase that training is in."""
        return "step" if self.done else "first_step"

    def mark(self, phase: str, instant: str) -> None:
        """Begin an instant, and keep the peaks of the one before."""
        import torch

        stats = torch.cuda.memory_stats()
        levels = {level: stats[f"{level}_bytes.all.peak"] for level in ("requested", "allocated", "reserved")}
        self.spans.append({"phase": self._now[0], "instant": self._now[1], **levels})
        self._now = (phase, instant)
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook every module, optimizer and backward pass of the process for the length of the block."""
        import torch
        from torch.nn.modules import module as hooks
        from torch.optim import optimizer as optimizers

        from memfit.virtual.patching import patched

        with ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
                optimizers.register_optimizer_step_pre_hook(lambda *_: self.mark(self.phase, "optimizer step")),
                optimizers.register_optimizer_step_post_hook(self._stepped),
            ):
                stack.callback(handle.remove)
            stack.enter_context(patched(torch.autograd, {"backward": self._backward(torch.autograd.backward)}))
            yield
        self.mark("end", "end")

    def _enter(self, module: Any, _: Any) -> None:
        if not self._depth and not self._busy:
            self.mark(self.phase if module.training else "eval", "forward")
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _backward(self, real: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            self.mark(self.phase, "backward")
            self._busy = True
            try:
                real(*args, **kwargs)
            finally:
                self._busy = False
            self.mark(self.phase, "after backward")

        return backward

    def _stepped(self, *_: Any) -> None:
        self.mark(self.phase, "after the step")
        self.done += 1


def measure(case: Any) -> dict[str, Any]:
    """Run a case on the card that `cuda` is; return its spans, the card's facts and library versions."""
    import torch

    from memfit.virtual.jobs import run

    watch, oom, began = Stopwatch(), False, time.perf_counter()
    with watch.watching():
        try:
            run(case.setup(), watch)  # type: ignore[arg-type]  (it marks as an Observer does)
        except torch.OutOfMemoryError:
            oom = True
    facts = torch.cuda.get_device_properties(0)
    return {
        "case": case.name, "spans": watch.spans, "oom": oom, "seconds": round(time.perf_counter() - began, 1),
        "card": {
            "name": facts.name, "capability": [facts.major, facts.minor], "total_bytes": facts.total_memory,
            "multiprocessors": facts.multi_processor_count,
        },
        "alloc_conf": case.alloc_conf, "versions": {p: version(p) for p in PACKAGES},
    }  # fmt: skip


def real(case: Any, tape: Path | None) -> dict[str, Any]:
    """Run a case on the real card, and write its memory history as a tape."""
    import torch

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = case.alloc_conf
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)
    found = measure(case)
    if tape is not None:
        keep(tape)
    return found


def keep(tape: Path) -> None:
    """Write the card's memory history as a tape."""
    import torch

    from memfit.documents import tape_file
    from memfit.documents.snapshot.history import tape_of

    tape.write_bytes(tape_file.dumps(tape_of(torch.cuda.memory._snapshot())))


def virtual(case: Any, card: dict[str, Any], tape: Path | None) -> dict[str, Any]:
    """Run a case on a virtual card with the facts of a real one."""
    from dataclasses import replace

    from memfit.catalogue.cards import find_gpu
    from memfit.virtual.virtual_gpu import Answers, virtual_gpu

    gpu = replace(
        find_gpu("h100"), total_bytes=card["total_bytes"], compute_capability=tuple(card["capability"]),
        sm_count=card["multiprocessors"],
    )  # fmt: skip
    with virtual_gpu(gpu, alloc_conf=case.alloc_conf, answers=Answers(balanced=False)):
        found = measure(case)
        if tape is not None:
            keep(tape)
        return found


def main() -> None:
    """Run `one.py CASE real [TAPE]` or `one.py CASE virtual CARD-AS-JSON [TAPE]`."""
    from measure.cases import CASES

    warnings.simplefilter("ignore")
    name, where, *rest = sys.argv[1:]
    case = next(c for c in CASES if c.name == name)
    if where == "real":
        found = real(case, Path(rest[0]) if rest else None)
    else:
        found = virtual(case, json.loads(rest[0]), Path(rest[1]) if rest[1:] else None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
