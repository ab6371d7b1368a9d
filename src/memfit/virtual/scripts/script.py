"""Run a user's training script unmodified on the virtual card: `python train.py ARGS` without a GPU."""

from __future__ import annotations

import functools
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException  # not a subclass of Exception

from memfit.errors import BadInput, Unsupported
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import STEPS, Alloc, Free, Phase, Tape
from memfit.reading.shell_words import for_rank
from memfit.units import gib
from memfit.virtual.device.graphs import KEPT
from memfit.virtual.libraries import apex, flash_attn, megatron_core, transformer_engine
from memfit.virtual.libraries.third_party import extensions_refused
from memfit.virtual.observer import EnoughSteps
from memfit.virtual.patching import combined, environment, patched, when_imported
from memfit.virtual.process.files import TENSOR_FILES, Saves, guarded, keeping, tensor_files
from memfit.virtual.process.host import hollow_host
from memfit.virtual.process.lifecycle import PATIENCE, contained
from memfit.virtual.process.recorded_inputs import recording
from memfit.virtual.ranks.peers import Peers
from memfit.virtual.ranks.place import Place
from memfit.virtual.ranks.traced import ScriptOutcome
from memfit.virtual.ranks.world import forget, in_this_process
from memfit.virtual.scripts.command_line import CommandLine
from memfit.virtual.scripts.endings import Endings, enough_behind, out_of_memory_behind, printed
from memfit.virtual.scripts.interpreters import module_file
from memfit.virtual.scripts.launched import variables
from memfit.virtual.scripts.loaders import ScriptObserver, enough_batches
from memfit.virtual.scripts.relaunch import no_children
from memfit.virtual.scripts.repositories import Repositories, changes
from memfit.virtual.scripts.stages import loops_can_end
from memfit.virtual.virtual_gpu import Answers, Card, alloc_conf_of_environment, one_thread, virtual_gpu

_CAPTURE = re.compile(r"^[^#\n]*\b(CUDAGraph|cuda\.graph|make_graphed_callables)\(", re.MULTILINE)
_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_APPROXIMATE = (  # prefix of an operator's name -> what its CUDA kernel does that is not modelled
    ("_thnn_fused", "recurrent layers: PyTorch's own cells in the place of cuDNN's"),
)
_BESIDE: tuple[tuple[Phase, str, str], ...] = (  # phase, pattern of code that leads to it, its name
    ("eval", r"^(?:[^#=]*\.eval\(\)|[^#]*inference_mode\()", "evaluation"),
    ("save", r"^[^#]*(?:\btorch\.save|save_file|save_pretrained|save_checkpoint|save_model|save_state)\(",
     "saving of a checkpoint"),
)  # fmt: skip


def trace_script(
    path: Path, args: Sequence[str], gpu: str | Gpu, *, steps: int = STEPS, alloc_conf: str = "",
    answers: Answers | None = None, capacity: int | None = -1, nccl: int = 0, world_size: int = 1,
    command: CommandLine | None = None, place: Place | None = None, peers: Peers | None = None,
) -> tuple[Tape, ScriptOutcome]:  # fmt: skip
    """Run `path` as `python path *args` would, on the named card, until `steps` optimizer steps are done.

    capacity: bytes its driver can hand out (None: any number; default: the card's own), of which NCCL takes `nccl` with
    the first collective, as for `virtual_gpu`.
    world_size: run it as rank 0 of so many processes that torchrun started, with a card each. command: the command line
    that starts it, if it says more: that `path` is a module's, what the launcher puts into the environment. place: run
    it as that rank instead; peers: its way to the other ranks that are traced. Raises BadInput that names the line, for
    a script that cannot be run.
    """
    module = command.entry if command and command.kind == "module" else ""
    path = module_file(module) if module else path
    if not path.is_file():
        raise BadInput(f"{path} does not exist", hint="give the path of a Python script")
    if steps < 1:
        raise BadInput(f"--steps {steps} trains nothing", hint="three steps show the peak of most runs")
    settings = command.settings if command else None
    if place is None and world_size > 1:
        place = Place(0, world_size)
    peers = Peers(place.rank) if place and peers is None else peers
    cards = max(command.devices, 1) if command and place is None else 1
    set_by_launcher = {} if settings is None else variables(settings, place.world_size if place else 1)
    card_of = virtual_gpu(
        gpu, capacity=capacity, nccl=nccl, alloc_conf=alloc_conf, answers=answers, place=place, peers=peers, cards=cards
    )

    before = alloc_conf_of_environment()
    follows = alloc_conf == before  # else it was named on the command line
    rank = f"rank-{place.rank if place else 0}"
    with (
        one_thread(), card_of as card, recording(card.ledger, rank), environment(set_by_launcher),
        no_children(command) if command else nullcontext(),
    ):  # fmt: skip
        if command:
            os.environ.update({name: for_rank(value, os.environ) for name, value in command.variables.items()})
        if follows:
            card.alloc_conf_in_time = alloc_conf_of_environment
        observer = ScriptObserver(card, steps)
        if peers is not None:
            observer.growth.anywhere = peers.anywhere
            observer.alone = len(peers.traced) == 1
        run = _ScriptRun(path, observer, place or Place(0, 1, cards), module)
        if place is not None and place.world_size > 1:
            run.note(_whose_ranks(place, peers))
        if settings is not None:
            run.note(f"started as by: {shlex.join(['accelerate', 'launch', *settings])} {path}")
        with run.prepared([for_rank(word, os.environ) for word in args]):
            ending, error = run.attempt()
            if (after := alloc_conf_of_environment()) not in (card.alloc_conf, before):
                late = "after its first allocation" if follows else f"not {alloc_conf or 'the default'}"
                run.note(f"the script sets PYTORCH_ALLOC_CONF {late}, which was not followed: --alloc-conf {after}")
            elif card.alloc_conf != alloc_conf:
                run.note(f"allocator settings of the script: {card.alloc_conf}")
        tape = observer.tape(_about(path, card))
        if len(card.used) > 1:
            tape = run.fullest(tape, card.used)
        for start, text in _APPROXIMATE:
            if any(label.startswith(start) for label in card.ledger.labels):
                run.note(text)
        if re.search("cuda[-_]graph", " ".join(args)) and KEPT not in run.assumed:
            run.note("no CUDA graph was captured in these steps, as the arguments may bring; --steps goes further")
        if ending != "oom":
            run.unreached(ending)
        untrained = "" if ending == "oom" else run.endings.untrained(run.stopped)
        return tape, ScriptOutcome(
            ending, observer.done, where=run.endings.place(error) + run.endings.inside(error),
            message=str(error) if error is not None else "", trace=printed(error),
            survived=len(card.ledger.refused) - (ending == "oom"), assumed=tuple(run.assumed),
            answered=dict(card.answers.reads), untrained=untrained,
            leaks=(observer.growth.found,) if observer.growth.found else (),
            communicators=len(card.communicators),
            processes=max(card.communicators.values(), default=1), routed=card.answers.routing.given,
        )  # fmt: skip


def _about(path: Path, card: Card) -> dict[str, str]:
    """Return the facts of a tape."""
    known = {"script": path.name, "gpu": card.gpu.name, "alloc_conf": card.alloc_conf, "torch": str(torch.__version__)}
    return known if card.limit is None else known | {"capacity": str(card.limit)}


def _whose_ranks(place: Place, peers: Peers | None) -> str:
    """Describe what is assumed of the ranks that are not traced."""
    traced = 1 if peers is None else len(peers.traced)
    whose = "the other ranks are taken to do what it does; "
    if traced > 1:
        whose = "ranks that are not traced are taken to do what the traced ones do; "
    if traced == place.world_size:
        whose = ""
    return f"rank {place.rank} of {place.world_size}: {whose}NCCL's own buffers are not in the tape"


def _requested(tape: Tape) -> int:
    """Return the most bytes that are requested at once on a tape."""
    held, now, most = dict[int, int](), 0, 0
    for event in tape.events:
        if isinstance(event, Alloc):
            held[event.id] = event.size
            now += event.size
            most = max(most, now)
        elif isinstance(event, Free):
            now -= held.pop(event.id, 0)
    return most


class _ScriptRun:
    """One run of a script: prepares its process, runs it, and collects what was assumed."""

    def __init__(self, path: Path, observer: ScriptObserver, place: Place, module: str = "") -> None:
        self.path, self.observer, self.process, self.module = path.resolve(), observer, place, module
        self.endings = Endings(self.path, observer, module)
        self.stopped: SystemExit | None = None  # with which the script ended itself, if all was well
        self.assumed = observer.assumed
        observer.captures = _CAPTURE.search(self.path.read_text(errors="replace")) is not None
        self.set_to_evaluate: set[int] = set()  # lines of the script that called a module's eval()

    def note(self, text: str) -> None:
        """Add an assumption, once."""
        self.assumed.setdefault(text)

    def fullest(self, tape: Tape, devices: Sequence[int]) -> Tape:
        """Return the part of the device that most was requested of, and say what the others were asked for."""
        parts = {device: self.observer.card.ledger.part(tape, device) for device in devices}
        peaks = {device: _requested(part) for device, part in parts.items()}
        worst = max(devices, key=peaks.__getitem__)
        of_all = ", ".join(f"cuda:{device} {gib(peaks[device], 2)} GiB" for device in devices)
        self.note(f"this process uses several cards, of which cuda:{worst} is shown: {of_all} requested at most")
        return parts[worst]

    @contextmanager
    def prepared(self, args: list[str]) -> Iterator[None]:
        """Make the process look as the script expects it, for the length of the block."""
        observer = self.observer

        def loading() -> None:
            observer.mark("resume" if observer.any_made else "load", "loading a file")

        saves = Saves(lambda: observer.mark("save", "saving"), loading)
        with ExitStack() as stack:
            stack.callback(forget)
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            table = combined(
                changes(Repositories(root, self.note)),
                {"transformers.trainer": self._fewer_steps, "torch.utils.cpp_extension": extensions_refused},
                dict.fromkeys(_LIGHTNING, self._stops_early),
                dict.fromkeys(TENSOR_FILES, tensor_files),
                megatron_core.CHANGES,
            )
            words = {"save": saves.save, "load": saves.load(torch.load)}
            for context in (
                in_this_process(self.process), guarded(self.path.parent), hollow_host(), enough_batches(observer),
                observer.watching(), self._noting_eval(), keeping(saves), when_imported(table), patched(torch, words),
                _no_data_parallel(), standing_in(self.path, args, self.note),
                _as_main(self.path, args, Path.cwd() if self.module else self.path.parent, observer.card.count),
            ):  # fmt: skip
                stack.enter_context(context)
            yield

    def attempt(self) -> tuple[Literal["enough", "finished", "oom"], BaseException | None]:
        """Run the script. Raises BadInput if it fails before the steps are done."""
        try:
            with contained(self.endings.own) as threads, loops_can_end(self.observer.stages, self.endings.changed):
                if self.module:
                    runpy.run_module(self.module, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(str(self.path), run_name="__main__")
        except EnoughSteps:
            return "enough", None
        except torch.OutOfMemoryError as error:
            return "oom", error
        except SystemExit as error:
            return self._stopped(error)
        except (Exception, CheckpointException) as error:
            if self.observer.done < self.observer.enough:
                raise self.endings.failure(error) from error
            self.note(self.endings.after_steps(error))
            return "enough", None
        if threads.left:
            names = ", ".join(threads.left)
            self.note(f"threads still ran {PATIENCE:.0f} s after the script's end, and are not traced further: {names}")
        if threads.oom or threads.enough:
            return "oom" if threads.oom else "enough", threads.oom
        if not self.observer.done:
            self.note("the script made no optimizer step")
        return "finished", None

    def _stopped(self, error: SystemExit) -> tuple[Literal["enough", "finished", "oom"], BaseException | None]:
        """Return how a script ended that exits. Raises BadInput for a failure before the steps are done."""
        if enough_behind(error):
            return "enough", None
        if error.code in (None, 0):
            self.stopped = error
            return "finished", None
        if ran_out := out_of_memory_behind(error):
            return "oom", ran_out
        if self.observer.done < self.observer.enough:
            raise self.endings.exited(error) from error
        self.note(self.endings.after_steps(error))
        return "enough", None

    def unreached(self, ending: str) -> None:
        """Note what the script has but did not reach: optimizers, evaluation, saving."""
        for optimizer in self.observer.lacking:
            self.note(optimizer)
        if ending != "enough" and not self.observer.dry:  # the script came to its end
            return
        seen = {phase for _, phase, _ in self.observer.card.ledger.marks}
        lines = self.path.read_text(errors="replace").splitlines()
        for phase, pattern, what in _BESIDE:
            found = (n for n, line in enumerate(lines, 1) if re.search(pattern, line))
            number = next((n for n in found if n not in self.set_to_evaluate), 0)
            if number and phase not in seen:
                self.note(f"no {what} was seen in these steps, as line {number} may bring; --steps goes further")
        captured = KEPT in self.assumed
        if number := next((n for n, line in enumerate(lines, 1) if _CAPTURE.match(line) and not captured), 0):
            self.note(f"no capture of a CUDA graph was seen, as line {number} may bring: its pool is not counted")

    def _noting_eval(self) -> AbstractContextManager[None]:
        """Remember which lines of the script put a module into evaluation: those were seen."""
        real = torch.nn.Module.eval

        def evaluate(module: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != str(self.path):  # a class may have its own eval()
                frame = frame.f_back
            if frame is not None:
                self.set_to_evaluate.add(frame.f_lineno)
            return real(module)

        return patched(torch.nn.Module, {"eval": evaluate})

    def _fewer_steps(self, module: ModuleType) -> Any:
        """Make a Trainer end by itself after the steps, so that the script goes on to evaluate and save."""
        real, enough = module.Trainer.train, self.observer.enough

        @functools.wraps(real)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = trainer.args.max_steps
            trainer.args.max_steps = enough if wanted <= 0 else min(wanted, enough)

            def lengthen(steps: int) -> None:
                longer = trainer.args.max_steps + steps
                trainer.args.max_steps = trainer.state.max_steps = longer if wanted <= 0 else min(wanted, longer)

            self.observer.lengthen.append(lengthen)
            return real(trainer, *args, **kwargs)

        return patched(module.Trainer, {"train": train})

    def _stops_early(self, module: ModuleType) -> Any:
        """Make Lightning's Trainer stop as by its EarlyStopping after the steps: it then validates and saves."""
        observer = self.observer

        def should_stop(trainer: Any) -> bool:
            return observer.over or bool(trainer.__dict__.get("should_stop"))

        def asked(trainer: Any, value: bool) -> None:
            trainer.__dict__["should_stop"] = value

        return patched(module.Trainer, {"should_stop": property(should_stop, asked)})


@contextmanager
def standing_in(path: Path, args: Sequence[str], note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Let the script find what needs a CUDA compiler to install, and note it when it does."""
    with ExitStack() as stack:
        stack.enter_context(apex.standing_in(note))
        stack.enter_context(transformer_engine.standing_in(note))
        asked = flash_attn.named_in(path.read_text(errors="replace"), " ".join(args)) or flash_attn.asked_in(args)
        asked = asked or flash_attn.installed() is not None
        if asked or transformer_engine.is_checkout():  # clusters that have one of them have the other
            note(flash_attn.ASSUMED)
            stack.enter_context(flash_attn.standing_in())
        yield


def _no_data_parallel() -> AbstractContextManager[None]:
    """Refuse torch.nn.DataParallel, which would use several cards from one process."""
    real = torch.nn.DataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if (count := len(self.device_ids)) > 1:
            raise Unsupported(
                f"torch.nn.DataParallel on {count} cards of one process is not traced",
                hint=f"one process a card: torchrun --nproc_per_node {count}; or one card: CUDA_VISIBLE_DEVICES=0",
            )

    return patched(torch.nn.DataParallel, {"__init__": init})


@contextmanager
def _as_main(path: Path, args: list[str], first: Path, cards: int = 1) -> Iterator[None]:
    """Set sys.argv and sys.path as for a script; afterwards restore global settings and drop its modules.

    first: the folder that comes first on the path, the script's own, or the current one for `python -m`. cards: how
    many are visible.
    """
    visible = ",".join(map(str, range(cards)))
    before = dict(sys.modules)
    words = {"argv": [str(path), *args], "path": [str(first), *sys.path]}
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    settings = {
        "WANDB_MODE": "disabled", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": visible,
    }  # fmt: skip
    try:
        with environment(settings), patched(sys, words):
            yield
    finally:
        torch.set_default_device(None)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if module is before.get(name) or not file or "site-packages" in file:
                continue
            if Path(file).is_relative_to(path.parent):
                del sys.modules[name]
                if name in before:  # __mp_main__, which multiprocess replaces by the script when it is imported
                    sys.modules[name] = before[name]
