"""Run a user's training script unmodified on the virtual card: `python train.py ARGS` without a GPU."""

from __future__ import annotations

import functools
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException  # not a subclass of Exception

from memfit._package import FOLDER
from memfit.errors import BadInput, MemfitError
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Phase, Tape
from memfit.virtual.libraries import flash_attn
from memfit.virtual.observer import EnoughSteps
from memfit.virtual.patching import environment, patched, when_imported
from memfit.virtual.process.files import Saves, guarded
from memfit.virtual.process.host import hollow_host
from memfit.virtual.ranks.peers import Peers
from memfit.virtual.ranks.place import Place
from memfit.virtual.ranks.spawned import in_this_process
from memfit.virtual.ranks.world import forget
from memfit.virtual.scripts.launched import variables
from memfit.virtual.scripts.loaders import ScriptObserver, enough_batches
from memfit.virtual.scripts.repositories import Repositories, changes
from memfit.virtual.virtual_gpu import Answers, alloc_conf_of_environment, virtual_gpu


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """How a script's run ended, and what was assumed.

    ending: "enough" steps were done, the script "finished" by itself, or it ran out of memory ("oom"): then `where` is
    its line, `message` PyTorch's message and `trace` what Python would have printed. survived: how often the script
    caught an out-of-memory error and went on. answered: how often each kind of unknown value was read.
    """

    ending: Literal["enough", "finished", "oom"]
    steps: int
    where: str = ""
    message: str = ""
    trace: str = ""
    survived: int = 0
    assumed: tuple[str, ...] = ()
    answered: dict[str, int] = field(default_factory=dict)


_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_TORCHRUN = "--gpu 8xh100 runs the script as torchrun starts its rank 0, --num-gpus 1 as the only one"
# exception type or a base of it, part of its message -> hint; the first row that fits
_HINTS: tuple[tuple[str, str, str], ...] = (
    ("NameError", "", "plain 'python' stops there too: the script uses a name it never made"),
    ("SyntaxError", "", "plain 'python' stops there too"),
    ("ImportError", "", "install it where memfit is installed"),
    ("DatasetNotFoundError", "", "no network: give the script a local file, load_dataset('json', data_files=...)"),
    ("OfflineModeIsEnabled", "", "no network: give the script local files, or load them into the cache once"),
    ("ConnectionError", "", "no network: give the script local files, or load them into the cache once"),
    ("LocalEntryNotFoundError", "", "no network: give the script local files, or load them into the cache once"),
    ("FileNotFoundError", "", "paths are looked up from the current folder, as 'python SCRIPT' does"),
    ("NotImplementedError", "Sparse",
     "sparse tensors hold no bytes on the virtual card: trace it with dense ones (sparse=False)"),
    ("NotImplementedError", "", "the operator has no shape function: torch.library.register_fake gives it one"),
    ("AcceleratorError", "", "a trace needs no GPU, and takes one that is there for nothing"),
    ("ValueError", "existing deepspeed config",
     "its path is looked up from the current folder: cd there, as for accelerate launch"),
    ("RuntimeError", "NCCL", _TORCHRUN),
    ("ValueError", "rendezvous", _TORCHRUN),
    ("RuntimeError", "process group", _TORCHRUN),
    *(("KeyError", f"'{name}'", _TORCHRUN) for name in _LAUNCHED),
)  # fmt: skip
_APPROXIMATE = (  # prefix of an operator's name -> what its CUDA kernel does that is not modelled
    ("convolution", "convolutions: without cuDNN's workspaces"),
    ("_thnn_fused", "recurrent layers: PyTorch's own cells in the place of cuDNN's"),
)
_BESIDE: tuple[tuple[Phase, str, str], ...] = (  # phase, pattern of code that leads to it, its name
    ("eval", r"^[^#]*(?:\.eval\(\)|inference_mode\()", "evaluation"),
    ("save", r"^[^#]*(?:\btorch\.save|save_file|save_pretrained|save_checkpoint|save_model|save_state)\(",
     "saving of a checkpoint"),
)  # fmt: skip
_OTHER = "if plain 'python' runs it on a GPU, a value that a trace lacks may be why: see --answer; --debug shows more"


def trace_script(
    path: Path, args: Sequence[str], gpu: str | Gpu, *, steps: int = 2, alloc_conf: str = "",
    answers: Answers | None = None, capacity: int | None = -1, world_size: int = 1, launcher: Path | None = None,
    launched: bool = False, place: Place | None = None, peers: Peers | None = None,
) -> tuple[Tape, ScriptOutcome]:  # fmt: skip
    """Run `path` as `python path *args` would, on the named card, until `steps` optimizer steps are done.

    capacity: bytes its driver can hand out (None: any number; default: the card's own), as for `virtual_gpu`.
    world_size: run it as rank 0 of so many processes that torchrun started, with a card each. launched: run it as the
    single process that torchrun started. launcher: a config file of accelerate, whose settings are put into the
    environment as `accelerate launch` does. place: run it as that rank instead; peers: its way to the other ranks that
    are traced. Raises BadInput that names the line, for a script that cannot be run.
    """
    if not path.is_file():
        raise BadInput(f"{path} does not exist", hint="give the path of a Python script")
    if steps < 1:
        raise BadInput(f"--steps {steps} trains nothing", hint="two steps show the peak of most runs")
    set_by_launcher = variables(launcher) if launcher else {}
    if place is None and (launched or world_size > 1):
        place = Place(0, world_size)
    card_of = virtual_gpu(gpu, capacity=capacity, alloc_conf=alloc_conf, answers=answers, place=place, peers=peers)
    import torch._dynamo  # else the first optimizer imports it, and the import's frame keeps that optimizer alive

    before = alloc_conf_of_environment()
    with card_of as card, environment(set_by_launcher):
        observer = ScriptObserver(card, steps)
        run = _ScriptRun(path, observer, place or Place())
        if place is not None and place.world_size > 1:
            run.note(_whose_ranks(place, peers))
        if launcher:
            run.note(f"started as by: accelerate launch --config_file {launcher} {path}")
        with run.prepared(list(args)):
            ending, error = run.attempt()
            if len(card.indices) > 2 or (0 not in card.indices and len(card.indices) > 1):
                run.note(
                    f"this process uses several cards, counted as one: cuda:{', cuda:'.join(map(str, card.indices))}"
                )
            if (after := alloc_conf_of_environment()) not in (alloc_conf, before):  # too late: torch is imported
                run.note(f"the script sets PYTORCH_ALLOC_CONF, which was not followed: --alloc-conf {after}")
        about = {"script": path.name, "gpu": card.gpu.name, "alloc_conf": alloc_conf, "torch": str(torch.__version__)}
        if card.limit is not None:
            about["capacity"] = str(card.limit)
        tape = observer.tape(about)
        for start, text in _APPROXIMATE:
            if any(label.startswith(start) for label in card.ledger.labels):
                run.note(text)
        if ending != "oom":
            run.unreached(ending)
        where, message = run.place(error), str(error) if error is not None else ""
        survived = len(card.ledger.refused) - (ending == "oom")
        reads = dict(card.answers.reads)
        return tape, ScriptOutcome(
            ending, observer.done, where, message, _printed(error), survived, tuple(run.assumed), reads
        )


def _whose_ranks(place: Place, peers: Peers | None) -> str:
    """Describe what is assumed of the ranks that are not traced."""
    traced = 1 if peers is None else len(peers.traced)
    whose = "the other ranks are taken to do what it does; "
    if traced > 1:
        whose = "ranks that are not traced are taken to do what the traced ones do; "
    if traced == place.world_size:
        whose = ""
    return f"rank {place.rank} of {place.world_size}: {whose}NCCL's own buffers are not in the tape"


class _ScriptRun:
    """One run of a script: prepares its process, runs it, and collects what was assumed."""

    def __init__(self, path: Path, observer: ScriptObserver, place: Place) -> None:
        self.path, self.observer, self.process = path.resolve(), observer, place
        self.assumed = observer.assumed

    def note(self, text: str) -> None:
        """Add an assumption, once."""
        self.assumed.setdefault(text)

    @contextmanager
    def prepared(self, args: list[str]) -> Iterator[None]:
        """Make the process look as the script expects it, for the length of the block."""
        observer = self.observer
        saves = Saves(lambda: observer.mark("save", "saving"), lambda: observer.mark("resume", "loading a checkpoint"))
        with ExitStack() as stack:
            stack.callback(forget)
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            table = changes(Repositories(root, self.note)) | {
                "transformers.trainer": self._fewer_steps,
                "safetensors.torch": lambda module: patched(module, {"save_file": saves.save}),
            }
            words = {"save": saves.save, "load": saves.load(torch.load)}
            for context in (
                in_this_process(self.process), guarded(self.path.parent), hollow_host(), enough_batches(observer),
                observer.watching(), when_imported(table), patched(torch, words),
                _as_main(self.path, args, self.process.local_size),
            ):  # fmt: skip
                stack.enter_context(context)
            if flash_attn.named_in(self.path.read_text(errors="replace"), *args):
                self.note(flash_attn.ASSUMED)
                stack.enter_context(flash_attn.standing_in())
            yield

    def attempt(self) -> tuple[Literal["enough", "finished", "oom"], BaseException | None]:
        """Run the script. Raises BadInput if it fails before the steps are done."""
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        except EnoughSteps:
            return "enough", None
        except torch.OutOfMemoryError as error:
            return "oom", error
        except SystemExit as error:
            if error.code not in (None, 0):
                raise BadInput(self._exited(error.code), hint="see what it printed") from error
        except (Exception, CheckpointException) as error:
            if self.observer.done < self.observer.enough:
                raise self._failure(error) from error
            self.note(f"after its steps the script failed at {self.place(error)}: {type(error).__name__}")
            return "enough", None
        if not self.observer.done:
            self.note("the script made no optimizer step")
        return "finished", None

    def unreached(self, ending: str) -> None:
        """Note what the script has but did not reach: optimizers, evaluation, saving."""
        for optimizer in self.observer.lacking:
            self.note(optimizer)
        if ending != "enough" and not self.observer.dry:  # the script came to its end
            return
        seen = {phase for _, phase, _ in self.observer.card.ledger.marks}
        lines = self.path.read_text(errors="replace").splitlines()
        for phase, pattern, what in _BESIDE:
            number = next((n for n, line in enumerate(lines, 1) if re.search(pattern, line)), 0)
            if number and phase not in seen:
                self.note(f"no {what} was seen in these steps, as line {number} may bring; --steps goes further")

    def place(self, error: BaseException | None) -> str:
        """Return `train.py:41`, the innermost line of the script or of a module beside it."""
        if error is None:
            return ""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{Path(error.filename).name}:{error.lineno}"
        frames = [f for f in traceback.extract_tb(error.__traceback__) if self._own(f.filename)]
        return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else self.path.name

    def _own(self, filename: str) -> bool:
        path = Path(filename)
        return path.is_relative_to(self.path.parent) and "site-packages" not in path.parts

    def _exited(self, code: object) -> str:
        """Describe the end of a script by its exit code, or by the message of `sys.exit("no data")`."""
        message = str(code).strip().splitlines()
        why = f"with exit code {code}" if isinstance(code, int) or not message else f"by itself: {message[0][:300]}"
        steps = self.observer.done
        return f"{self.path.name} ended {why} (after {steps} optimizer step{'s' * (steps != 1)})"

    def _failure(self, error: BaseException) -> BadInput:
        where = self.place(error)
        if isinstance(error, MemfitError):
            return BadInput(f"{where}: {error.message}", hint=error.hint)
        kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
        hint = next((h for kind, part, h in _HINTS if kind in kinds and part in text), _OTHER)
        return BadInput(f"{where}: {type(error).__name__}: {_first_line(error)}", hint=hint)

    def _fewer_steps(self, module: ModuleType) -> Any:
        """Make a Trainer end by itself after the steps, so that the script goes on to evaluate and save."""
        real, enough = module.Trainer.train, self.observer.enough

        @functools.wraps(real)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = trainer.args.max_steps
            trainer.args.max_steps = enough if wanted <= 0 else min(wanted, enough)
            return real(trainer, *args, **kwargs)

        return patched(module.Trainer, {"train": train})


def _printed(error: BaseException | None) -> str:
    """Return the traceback as Python prints it, without frames of memfit."""
    if error is None:
        return ""
    paths = ((Path(f.filename), f) for f in traceback.extract_tb(error.__traceback__))
    frames = [f for path, f in paths if path.is_file() and not path.is_relative_to(FOLDER)]
    message = "".join(traceback.format_exception_only(error))
    return f"Traceback (most recent call last):\n{''.join(traceback.format_list(frames))}{message}".rstrip()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


@contextmanager
def _as_main(path: Path, args: list[str], cards: int = 1) -> Iterator[None]:
    """Set sys.argv and sys.path as for a script; afterwards restore global settings and drop its modules."""
    visible = ",".join(map(str, range(cards)))
    before = dict(sys.modules)
    words = {"argv": [str(path), *args], "path": [str(path.parent), *sys.path]}
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    settings = {"WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": visible}
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
