"""Rehearse the run's peak before the first step: train on the longest samples, then restore everything."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memfit.train.sample_counts import KEY

STEPS_INSIDE_BACKWARD = ("lomo", "adalomo")  # their step() does nothing, and they have no states


def rehearse(trainer: Any, model: Any, optimizer: Any, step: bool, then: Callable[[], None] | None = None) -> int:
    """Run forward and backward on the longest samples and, with `step`, an optimizer step that changes no weight.

    `then` is called where an evaluation would run: with optimizer states, without gradients. Returns the tokens of the
    longest sample. Weights, gradients, optimizer, random numbers and the trainer's counters are restored.

    The step has zero gradients and a learning rate of zero, with which every optimizer of optimizers.py leaves the
    weights unchanged bit for bit. Its states are dropped, so `step` is only for an optimizer that has none yet.
    """
    rows = worst_rows(trainer)
    with untouched(trainer, model):
        batch = trainer.data_collator(rows)
        widths = [batch[name].shape[-1] for name in batch if name.endswith("_input_ids")]  # of texts tokenized here
        batch = {k: v.to(trainer.args.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)

        def passes() -> None:
            # the second pass runs beside the gradients of the first
            for _ in range(min(trainer.args.gradient_accumulation_steps, 2)):
                trainer.training_step(model, dict(batch), items)

        passes()
        if step and trainer.args.optim not in STEPS_INSIDE_BACKWARD:
            with empty_step(getattr(optimizer, "optimizer", optimizer)):
                model.zero_grad(set_to_none=True)
                passes()  # as from the second step on, with states beside the activations
                _between_steps(model, then)
        else:
            _between_steps(model, then)
    return max(widths or map(tokens, rows))


def _between_steps(model: Any, then: Callable[[], None] | None) -> None:
    if then:
        model.zero_grad(set_to_none=True)
        then()


def rehearse_evaluation(trainer: Any, model: Any) -> None:
    """Evaluate the worst batch. The caller restores random numbers and counters."""
    batch = trainer.data_collator(worst_rows(trainer, evaluation=True))
    batch.pop(KEY, None)
    model.eval()
    trainer.prediction_step(model, batch, prediction_loss_only=True)


def worst_rows(trainer: Any, evaluation: bool = False) -> list[Any]:
    """Return a micro-batch of the longest samples."""
    data, size = trainer.train_dataset, trainer.args.train_batch_size
    if evaluation:
        data, size = trainer.eval_dataset, trainer.args.eval_batch_size
    columns = [name for name in data.column_names if name.endswith("_ids")]
    if columns:
        data = trainer._remove_unused_columns(data, "evaluation" if evaluation else "training")
    else:  # texts, which the collator tokenizes: the longest stands for the one of most tokens
        columns = data.column_names
    lengths = [tokens(dict(zip(columns, row, strict=True))) for row in zip(*(data[c] for c in columns), strict=True)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:size]
    return [data[i] for i in (order * size)[:size]]  # repeats samples if there are fewer than a batch


def tokens(row: Mapping[str, Any]) -> int:
    """Return the tokens of a sample: of a text, or of a prompt with the longer of its answers.

    Of texts that are not tokenized yet, return the characters of the longest.
    """
    if "input_ids" in row:
        return len(row["input_ids"])
    if "prompt_ids" not in row:
        return max(map(len, row.values()))
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


@contextlib.contextmanager
def empty_step(optimizer: Any) -> Iterator[None]:
    """Take a step that changes no weight, and clear the optimizer's states after the block."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            if weight.grad is not None:
                weight.grad.zero_()
    try:
        optimizer.step()
        yield
    finally:
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for name in [name for name in group if name != "params" and name not in before]:
                del group[name]
            group.update(before)


def randomness() -> tuple[Any, ...]:
    """Return the states of all random number generators."""
    import numpy

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def restore(numbers: tuple[Any, ...]) -> None:
    """Set the states of all random number generators, as `randomness` returned them."""
    import numpy

    python, of_numpy, host, cuda = numbers
    random.setstate(python)
    numpy.random.set_state(of_numpy)
    torch.set_rng_state(host)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def untouched(trainer: Any, model: Any) -> Iterator[None]:
    """Restore gradients, random numbers and the trainer's counters after the block."""
    names = ("_metrics", "_total_train_tokens", "current_gradient_accumulation_steps")
    counters = {name: copy.deepcopy(getattr(trainer, name)) for name in names if hasattr(trainer, name)}
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    numbers, training = randomness(), model.training
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)
        restore(numbers)
        for name, value in counters.items():
            setattr(trainer, name, value)
