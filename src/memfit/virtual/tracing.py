"""Run a training job on a virtual card without a limit and keep what happened as a tape."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from memfit.errors import BadInput, MemfitError, Unsupported
from memfit.gpu import Gpu
from memfit.job import Recipe
from memfit.supported import check_trace, versions
from memfit.tape import Tape
from memfit.virtual.patching import environment, patched

if TYPE_CHECKING:
    from memfit.virtual.jobs.setup import Setup

Tell = Callable[[str, float], None]


def trace_recipe(
    recipe: Recipe, config: dict[str, Any], gpu: Gpu, tell: Tell = lambda text, share: None, *, lean: bool = False
) -> tuple[Tape, dict[str, int]]:
    """The tape of the recipe's own trainer on a card like `gpu` without a limit, and what had to be answered.

    config: the model's config.json. lean: this process traces nothing else, so libraries the recipe has no use for may be
    kept away from the others. Raises BadInput where PyTorch or the trainer is not installed, Unsupported for a
    recipe that has no job.
    """
    check_trace()
    from memfit.virtual.jobs.recipe import setup_of

    setup = setup_of(recipe, config)
    tell("importing the training libraries", 0.1)
    with quiet():
        from memfit.virtual import flash_attn, virtual_gpu
        from memfit.virtual.host import no_random_weights
        from memfit.virtual.jobs import import_libraries, run
        from memfit.virtual.lean import lean_imports
        from memfit.virtual.observer import Observer

        with (
            lean_imports() if lean else contextlib.nullcontext(),
            as_in_a_run(setup, lean),
            virtual_gpu(
                gpu,
                capacity=None,
                alloc_conf=recipe.alloc_conf,
                world_size=recipe.num_gpus,
                launched=bool(setup.deepspeed),
            ) as card,
            flash_attn.standing_in() if flash_attn.named_in(setup.attention) else contextlib.nullcontext(),
        ):
            observer = Observer(card)
            try:
                import_libraries(setup)
                tell("training on the virtual card", 0.4)
                with collecting(), no_random_weights(), observer.watching():
                    run(setup, observer)
            except MemfitError:
                raise
            except Exception as error:
                text = str(error).strip().splitlines() or [""]
                if "Unrecognized model identifier" in text[0]:
                    raise Unsupported(
                        f"{config.get('model_type')} models bring their own code, which a trace does not have",
                        hint="memfit estimate answers by formula",
                    ) from error
                raise BadInput(
                    f"the trainer failed: {type(error).__name__}: {text[0][:200]}",
                    hint="--debug shows where; memfit estimate answers by formula",
                ) from error
            about = {"alloc_conf": recipe.alloc_conf, "gpu": gpu.name, **versions()}
            return observer.tape(about), dict(card.answers.asked)


@contextlib.contextmanager
def as_in_a_run(setup: Setup, lean: bool) -> Iterator[None]:
    """What differs between this program and a training script: threads and optional packages.

    One thread serves the few numbers that are real, and in a `lean` process bitsandbytes, which PEFT imports wherever
    it finds it, stays away from a job that has no use for it.
    """
    import torch

    threads = torch.get_num_threads()
    wanted = bool(setup.quantization) or any(word in setup.optimizer for word in ("bit", "bnb", "lion", "paged"))
    hidden = {"bitsandbytes": None} if lean and not wanted and "bitsandbytes" not in sys.modules else {}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """Cycles that the job leaves behind are collected as in a training script; what was there before is not looked at."""
    before = gc.isenabled()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
        if not before:
            gc.disable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The libraries' own progress, warnings and advice are not this program's output; nothing is looked up on the Hub."""
    from huggingface_hub import constants  # which reads the environment once, when it is imported

    words = {k: v for k, v in {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}.items() if k not in os.environ}
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            environment(words),
            patched(constants, {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1") not in ("", "0")}),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
