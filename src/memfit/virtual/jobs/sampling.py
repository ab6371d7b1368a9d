"""TRL's trainers that sample answers and learn from their rewards: GRPO and RLOO, with generation by transformers."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, TrainerCallback
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from memfit.frameworks.script_preferences import KL
from memfit.tables.tasks import TASKS
from memfit.virtual.jobs.models import adapter_config, load
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.jobs.tasks import compared, of_trl, words
from memfit.virtual.patching import patched

# tokens of an answer that are sampled one by one. Between them the cache of keys and values grows by several tokens at
# once, so that it has the length of the whole answer for the last tokens, where most is needed
SAMPLED = 8
_WORD = 3  # a token that ends no answer
_SINGLE = 2  # last tokens before which the cache grows by one


class _FewerMicroSteps(TrainerCallback):
    """Makes the trainer sample before every traced step, though only some micro-batches of a step are traced."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set how many micro-steps go by between two samplings. The loader has its batches, of the whole step."""
        args.steps_per_generation = args.gradient_accumulation_steps


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward of each answer: a plain function, which takes no memory on the card."""
    return [float(i % 2) for i in range(len(completions))]


def _strides(tokens: int) -> Iterator[int]:
    """Yield by how many tokens the cache grows before each token after the first, besides that one."""
    left, steps = tokens - SAMPLED, SAMPLED - 1 - _SINGLE
    for step in range(steps):
        yield left * (step + 1) // steps - left * step // steps
    yield from [0] * _SINGLE


def _answered(found: Tensor, sampled: int, tokens: int, config: Any) -> Tensor:
    """Return prompts with answers of so many tokens in place of the sampled ones, whose values are unknown.

    All answers but one end a token early, so that attention gets a mask in each micro-batch.
    """
    given = getattr(config, "eos_token_id", None)
    ends = given if isinstance(given, list) else [given] if given is not None else []
    word = next(i for i in range(_WORD, _WORD + len(ends) + 1) if i not in ends)
    answers = torch.full((len(found), tokens), word, device=found.device)
    if ends:
        answers[1:, -2:] = ends[0]
    return torch.cat([found[:, : found.shape[1] - sampled], answers], dim=1)


@contextmanager
def in_few_steps(setup: Setup) -> Iterator[None]:
    """Let transformers' `generate` sample SAMPLED tokens in place of more; what it returns is as long as asked for.

    The answers of a step are split into all of its micro-batches, also those that are not traced.
    """
    generate: Any = GenerationMixin.generate
    update, length, sliding = DynamicLayer.update, DynamicLayer.get_seq_length, DynamicSlidingWindowLayer.update

    def sampled(self: Any, *args: Any, generation_config: Any = None, **words: Any) -> Any:
        tokens = getattr(generation_config, "max_new_tokens", None) or 0
        if tokens <= SAMPLED:
            found = generate(self, *args, generation_config=generation_config, **words)
            return _answered(found, tokens, tokens, generation_config)
        config = copy.deepcopy(generation_config)
        config.max_new_tokens = config.min_new_tokens = SAMPLED
        strides = _strides(tokens)

        def before(module: Any, inputs: Any, given: dict[str, Any]) -> None:
            cache = given.get("past_key_values")
            if cache is None or not cache.get_seq_length():  # the pass over the prompt
                return
            stride = next(strides)
            for layer in cache.layers:
                layer.coming = stride
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length += stride

        with self.register_forward_pre_hook(before, with_kwargs=True):
            found = generate(self, *args, generation_config=config, **words)
        return _answered(found, SAMPLED, tokens, config)

    def grown(real: Any) -> Any:
        def updated(self: Any, keys: Any, values: Any, *args: Any, **words: Any) -> Any:
            coming = self.__dict__.pop("coming", 0)
            if coming and isinstance(self, DynamicSlidingWindowLayer):
                self.cumulative_length -= coming
                real(self, *(t[:, :, :1].expand(-1, -1, coming, -1) for t in (keys, values)))
            elif coming:  # at once, as a run grows it in every pass
                keys, values = (t[:, :, :1].expand(-1, -1, coming + 1, -1) for t in (keys, values))
            return real(self, keys, values, *args, **words)

        return updated

    module = importlib.import_module(of_trl(TASKS[setup.task], "Trainer").__module__)
    split, micro_steps = module.split_tensor_dict, setup.sampled // setup.micro_batch
    with (
        patched(module, {"split_tensor_dict": lambda batch, count: split(batch, micro_steps)}),
        patched(GenerationMixin, {"generate": sampled}),
        patched(DynamicLayer, {"update": grown(update), "get_seq_length":
                               lambda self: length(self) + self.__dict__.get("coming", 0)}),
        patched(DynamicSlidingWindowLayer, {"update": grown(sliding)}),
    ):  # fmt: skip
        yield


def build(setup: Setup, arguments: dict[str, Any], count: int) -> Any:
    """Return the trainer. arguments: those of every trainer; count: samples of one run."""
    import datasets

    row, shape = TASKS[setup.task], setup.shape
    made, config = of_trl(row, "Trainer"), of_trl(row, "Config")
    settings = arguments | {
        "remove_unused_columns": False, "num_generations": shape.generations,
        "max_completion_length": shape.completion, "generation_batch_size": setup.world_size * setup.sampled,
        "generation_kwargs": {"min_new_tokens": shape.completion},  # as many as there can be
    }  # fmt: skip
    if shape.reference:
        settings["beta"] = KL
    rows = [compared(setup)] * (4 * max(count, setup.world_size * setup.sampled))
    given = {"peft_config": adapter_config(setup)} if setup.method != "full" else {}
    # the reference model is made as the policy is: the trainer would read it from the model's folder or the Hub
    with patched(importlib.import_module(made.__module__), {"create_model_from_path": lambda *_, **__: load(setup)}):
        return made(
            args=config(**settings), model=load(setup), reward_funcs=reward, callbacks=[_FewerMicroSteps()],
            train_dataset=datasets.Dataset.from_list(rows), processing_class=words(), **given,
        )  # fmt: skip
