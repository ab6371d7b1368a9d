"""Run a training job on a virtual card without a limit and record it as a tape."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.errors import TRACE_HINT, BadInput, MemfitError, Unsupported
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.tape import Tape
from memfit.nouns.task import PLAIN, Images, Shape
from memfit.tables.adapters import adapter
from memfit.tables.tasks import TASKS
from memfit.virtual.patching import environment, no_log_warnings, patched, when_imported
from memfit.virtual.supported import check_trace, versions

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card
    from memfit.virtual.jobs.recipe import Setup
    from memfit.virtual.repeated_blocks.depths import Traced

Tell = Callable[[str, float], None]
_PAGED = "bytes of paged optimizer states"


def trace_recipe(
    recipe: Recipe, config: dict[str, Any], gpu: Gpu, tell: Tell = lambda text, share: None, *, lean: bool = False,
    full: bool = False, task: str = "", shape: Shape = PLAIN, brief: bool = False,
) -> tuple[Tape, dict[str, int]]:  # fmt: skip
    """Run the recipe's own trainer on a card like `gpu` without a limit; return its tape and reads of unknown values.

    config: the model's config.json. lean: this process traces nothing else, so libraries that the recipe does not use
    may be hidden from those that it uses. full: trace all blocks, also those that repeat. task: a row of
    tables/tasks.py other than sft. brief: leave out resuming and merging, which no verdict depends on.
    Raises BadInput where PyTorch or the trainer is not installed, Unsupported for a recipe that cannot be traced.
    """
    check_trace()
    from memfit.virtual.jobs.recipe import setup_of

    setup = setup_of(recipe, config, task, shape)
    if brief:
        setup = replace(setup, resume=False, merge=False)
    tell("importing the training libraries", 0.1)
    about = {"alloc_conf": recipe.alloc_conf, "gpu": gpu.name}
    with quiet(), as_in_a_run(setup, lean), _failures_explained(str(config.get("model_type")), recipe, task):
        with _card(setup, gpu, recipe.alloc_conf):
            from memfit.virtual.jobs import import_libraries
            from memfit.virtual.repeated_blocks.depths import depths, unrolled

            import_libraries(setup)
            plan = None if full else depths(setup)
        tell("training on the virtual card", 0.4)
        once = partial(_traced if full else _traced_in_sections, gpu=gpu, alloc_conf=recipe.alloc_conf)
        short = unrolled(plan, once, gpu) if plan else None
        tape, reads = short or once(setup)
        about |= {"paged": str(paged)} if (paged := reads.pop(_PAGED, 0)) else {}
        depth = {"depth": str(plan)} if short else {}
        return replace(tape, about={**tape.about, **about, **versions(), **depth}), reads


def counted(setup: Setup) -> Images:
    """Return the size and the tokens of a sample's images. Raises BadInput where its processor fails."""
    check_trace()
    with quiet(), _failures_explained(str(setup.config.get("model_type")), Recipe(), setup.task):
        from memfit.virtual.jobs import pictures
        from memfit.virtual.jobs.models import config_of
        from memfit.virtual.jobs.tasks import check

        check(TASKS[setup.task], str(setup.config.get("model_type")))
        return pictures.counted(setup, config_of(setup))


def import_ahead(recipe: Recipe, config: dict[str, Any], task: str = "", shape: Shape = PLAIN) -> None:
    """Import what traces of a recipe need, so that processes which are forked afterwards share it.

    No card is opened for it: autograd runs on one, and a process in which it has run cannot be forked. Nor is the
    machine's own card seen: libraries would bind their kernels to it, which a forked process cannot run.
    """
    check_trace()
    import torch

    from memfit.virtual.jobs import import_libraries
    from memfit.virtual.jobs.recipe import setup_of

    setup = setup_of(recipe, config, task, shape)
    cardless = patched(torch.cuda, {"is_available": lambda: False})
    explained = _failures_explained(str(config.get("model_type")), recipe, task)
    with quiet(), as_in_a_run(setup, lean=False), explained, cardless, no_log_warnings():  # bitsandbytes warns of it
        import_libraries(setup)


def _traced(setup: Setup, gpu: Gpu, alloc_conf: str) -> Traced:
    """Run one job on a card of its own."""
    from memfit.virtual.jobs import run
    from memfit.virtual.libraries.third_party import extensions_refused
    from memfit.virtual.observer import Observer
    from memfit.virtual.process.host import hollow_host, no_random_weights
    from memfit.virtual.repeated_steps import repeated

    with _card(setup, gpu, alloc_conf) as card:
        observer = Observer(card)
        compiled = when_imported({"torch.utils.cpp_extension": extensions_refused})
        with compiled, collecting(), hollow_host(), no_random_weights(), observer.watching():
            run(setup, observer)
        assumed = {"assumed": "\n".join(card.assumed)} if card.assumed else {}
        tape, reads = observer.tape(assumed), card.answers.reads
        if setup.sections:
            events, reads = repeated(tape.events, [*observer.reads, Counter(reads)], setup.steps)
            tape = replace(tape, events=events)
        # counted with the reads of unknown values, which are extrapolated to the layers that are not traced
        return tape, {**reads, _PAGED: card.paged}


def _traced_in_sections(setup: Setup, gpu: Gpu, alloc_conf: str) -> Traced:
    """Run the steps of a job's loop that differ, and repeat the others; run all where they do not repeat."""
    from memfit.virtual.repeated_steps import NotRepeated

    if setup.task and TASKS[setup.task].sample == "noise":
        with contextlib.suppress(NotRepeated):
            return _traced(replace(setup, sections=True), gpu, alloc_conf)
    return _traced(setup, gpu, alloc_conf)


@contextlib.contextmanager
def _card(setup: Setup, gpu: Gpu, alloc_conf: str) -> Iterator[Card]:
    """Open a card without a limit, with the stand-ins that the job needs."""
    from memfit.virtual.libraries import flash_attn
    from memfit.virtual.virtual_gpu import one_thread, virtual_gpu

    with (
        one_thread(),
        virtual_gpu(
            gpu, capacity=None, alloc_conf=alloc_conf, world_size=setup.world_size, launched=bool(setup.deepspeed)
        ) as card,
        flash_attn.standing_in() if flash_attn.named_in(setup.attention) else contextlib.nullcontext(),
    ):
        yield card


@contextlib.contextmanager
def _failures_explained(model_type: str, recipe: Recipe, task: str) -> Iterator[None]:
    """Turn a trainer's exceptions into memfit's errors."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        if "Unrecognized model identifier" in text[0]:
            raise Unsupported(
                f"{model_type} models bring their own code, which a trace does not have",
                hint=f"memfit estimate answers by formula; {TRACE_HINT}",
            ) from error
        raise BadInput(
            f"the trainer failed: {type(error).__name__}: {text[0][:200]}",
            hint=f"--debug shows where; {_instead(recipe, task)}",
        ) from error


def _instead(recipe: Recipe, task: str) -> str:
    """Return what else can be typed where a trainer failed."""
    if recipe.method != "full" and not adapter(recipe.adapter).by_formula:
        return "another --lora-rank or --lora-targets may do, or --adapter lora"
    return TRACE_HINT if task else "memfit estimate answers by formula"


@contextlib.contextmanager
def as_in_a_run(setup: Setup, lean: bool) -> Iterator[None]:
    """Hide bitsandbytes where it is not used.

    PEFT imports bitsandbytes wherever it is installed. It is hidden only in a `lean` process, which traces no other
    job, and not from diffusers, whose models need it where it is installed.
    """
    wanted = bool(setup.quantization) or setup.config.get("model_type") == "diffusers"
    wanted = wanted or any(word in setup.optimizer for word in ("bit", "bnb", "lion", "paged"))
    hidden = {"bitsandbytes": None} if lean and not wanted and "bitsandbytes" not in sys.modules else {}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """Collect the job's reference cycles as in a training script, leaving out objects from before."""
    enabled = gc.isenabled()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
        if not enabled:
            gc.disable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' progress bars, warnings and advice, and keep them from the Hub."""
    from huggingface_hub import constants  # reads the environment once, when it is imported

    words = {k: v for k, v in {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}.items() if k not in os.environ}
    with (
        no_log_warnings(),
        environment(words),
        patched(constants, {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1") not in ("", "0")}),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
