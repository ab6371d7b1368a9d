"""Run one case, on the real card or on a virtual one like it, and print its peaks by instant as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")


class Stopwatch:
    """Reads the peaks of every instant from torch.cuda, with the same hooks on a real and on a virtual card."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.steps: list[float] = []  # seconds at which each step was done on the card
        self.done, self._depth, self._busy, self._filled = 0, 0, False, False
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
        if not self._filled:
            self._filled = True
            fill(module)
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
        import torch

        torch.cuda.synchronize()
        self.steps.append(round(time.perf_counter(), 3))
        self.mark(self.phase, "after the step")
        self.done += 1


def fill(module: Any) -> None:
    """Fill weights, which nothing has initialised, with small numbers, so that no step is skipped for their sake."""
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for weight in module.parameters():
            own = weight._local_tensor if isinstance(weight, DTensor) else weight.data
            if own.is_floating_point() and own.is_cuda and own.numel():
                own.normal_(std=0.02)


def held_by_process() -> int:
    """Return the bytes of the card that the driver counts for this process, or 0 where it does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
        return next((int(p.usedGpuMemory or 0) for p in running if p.pid == os.getpid()), 0)
    except Exception:  # no library, no driver, no right to ask
        return 0


def measure(case: Any) -> dict[str, Any]:
    """Run a case on the card that `cuda` is; return its spans, the card's facts and library versions."""
    import torch

    watch, oom, error, began = Stopwatch(), False, "", time.perf_counter()
    with watch.watching():
        try:
            case.run(watch)  # it marks as an Observer does
        except torch.OutOfMemoryError as problem:
            oom, error = True, str(problem)
    facts = torch.cuda.get_device_properties(0)
    return {
        "case": case.name, "spans": watch.spans, "oom": oom, "seconds": round(time.perf_counter() - began, 1),
        "error": error, "step_seconds": [round(b - a, 3) for a, b in pairwise(watch.steps)],
        "device": held_by_process(), "reserved_at_end": torch.cuda.memory_reserved(),
        "card": {
            "name": facts.name, "capability": [facts.major, facts.minor], "total_bytes": facts.total_memory,
            "multiprocessors": facts.multi_processor_count,
        },
        "alloc_conf": case.alloc_conf, "versions": {p: version(p) for p in PACKAGES},
    }  # fmt: skip


def real(case: Any, tape: Path | None) -> dict[str, Any]:
    """Run a case on the real card, and write its memory history as a tape."""
    import torch

    from memfit.virtual.jobs import models
    from memfit.virtual.patching import patched

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = case.alloc_conf
    case.prepare()
    changes: dict[str, Any] = {"_warm_up_labelled": lambda _: nullcontext()}  # it labels a virtual card's tape
    if case.initialised:
        changes["no_init_weights"] = nullcontext
    unlabelled = patched(models, changes)
    with turn(alone=case.alone), world(case.world_size, case.slow), unlabelled:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)
        found = measure(case)
    if tape is not None:
        keep(tape)
    return found


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Wait until the card is free for this case: small ones share it, those whose steps are timed have it alone."""
    import fcntl

    with (Path(tempfile.gettempdir()) / "memfit-measure.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


BANDWIDTH, CLOCK = 50e9, 1.98e9  # bytes/s of a collective on a slow network; cycles/s of an H100 at full speed


@contextmanager
def world(size: int, slow: bool) -> Iterator[None]:
    """Make this process rank 0 of a world of PyTorch's fake process groups.

    slow: every collective keeps the stream that it was sent on busy for as long as its bytes would take.
    """
    if size == 1:
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from memfit.virtual.patching import patched

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    make = distributed_c10d._new_process_group_helper

    def helper(count: int, rank: int, ranks: Any, _: Any, *args: Any, **words: Any) -> Any:
        words |= {"backend_options": None, "device_id": None}
        return make(count, rank, ranks, dist.Backend("fake"), *args, **words)

    def slowed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            done = real(*args, **words)
            given = [t for t in (*args, *words.values()) if isinstance(t, torch.Tensor)]
            torch.cuda._sleep(int(max(t.nbytes for t in given) / BANDWIDTH * CLOCK))
            return done

        return call

    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce") if slow else ()
    changes = {name: slowed(getattr(dist, name)) for name in names}

    def hooked(ddp: Any, *args: Any, **words: Any) -> None:
        construct(ddp, *args, **words)
        ddp.register_comm_hook(None, done_at_once)

    def done_at_once(_: Any, bucket: Any) -> Any:
        # DDP's own hook divides by the world's size in place too; the fake group's future holds no tensor for it
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer().div_(size))
        return future

    done_at_once.__annotations__.clear()  # DDP reads them, and strings are no types to it
    construct = DistributedDataParallel.__init__
    with (
        patched(distributed_c10d, {"_new_process_group_helper": helper}),
        patched(dist, changes),
        patched(DistributedDataParallel, {"__init__": hooked}),
    ):
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        yield


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
    from memfit.virtual.process.host import no_random_weights
    from memfit.virtual.virtual_gpu import Answers, virtual_gpu

    gpu = replace(
        find_gpu("h100"), total_bytes=card["total_bytes"], compute_capability=tuple(card["capability"]),
        sm_count=card["multiprocessors"],
    )  # fmt: skip
    case.prepare()
    size = case.world_size
    with (
        no_random_weights(),
        virtual_gpu(
            gpu, alloc_conf=case.alloc_conf, answers=Answers.of(["routing=first"]), world_size=size, launched=size > 1,
        ),
    ):  # fmt: skip
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
