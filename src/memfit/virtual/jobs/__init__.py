"""Training jobs that run on the card: the trainers' own code with the settings of a Recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.tables.tasks import TASKS

if TYPE_CHECKING:  # a script's models need this package in environments that have none of memfit's own dependencies
    from memfit.virtual.jobs.recipe import Setup
    from memfit.virtual.observer import Observer

__all__ = ["import_libraries", "run"]


def import_libraries(setup: Setup) -> None:
    """Import what the job will use, including its model's code, before the card is observed."""
    if setup.task and TASKS[setup.task].sample == "noise":
        _import_diffusers(setup)
        return
    if setup.trainer == "trl":
        from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]  # noqa: F401
    elif setup.trainer == "transformers":
        from transformers import Trainer, TrainingArguments  # noqa: F401
    if setup.method != "full":
        import peft  # noqa: F401
    from memfit.virtual.jobs.models import class_of, config_of

    if setup.task:
        from memfit.virtual.jobs.tasks import check, of_trl

        check(TASKS[setup.task], str(setup.config.get("model_type")))
        if setup.trainer == "trl":
            of_trl(TASKS[setup.task], "Trainer")
    config = config_of(setup)
    class_of(config, setup.task)._model_mapping.get(type(config), None)


def _import_diffusers(setup: Setup) -> None:
    from memfit.virtual.jobs import diffusion
    from memfit.virtual.jobs.tasks import check

    check(TASKS[setup.task], str(setup.config.get("model_type")))
    diffusion.check(setup)
    import diffusers  # noqa: F401

    if setup.method != "full":
        import peft  # noqa: F401


def run(setup: Setup, observer: Observer) -> None:
    """Run a job to its end. Raises torch.OutOfMemoryError where the card would."""
    from memfit.virtual.jobs.windows import together

    with together(str(setup.config.get("model_type"))):
        _run(setup, observer)


def _run(setup: Setup, observer: Observer) -> None:
    if setup.task and TASKS[setup.task].sample == "noise":
        from memfit.virtual.jobs import diffusion

        diffusion.run(setup, observer)
    elif setup.trainer == "torch":
        from memfit.virtual.jobs import loop

        loop.run(setup, observer)
    else:
        from memfit.virtual.jobs import trainers

        trainers.run(setup, observer)
