"""MemfitCallback: watches a transformers Trainer, or one of TRL's, from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from memfit.extras import MissingExtra
from memfit.live.watch.loop import Watch, Watching, watch

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtra("MemfitCallback", "trace") from None


_UNDER_WAY: WeakKeyDictionary[Any, Callable[[], Watch | None]] = WeakKeyDictionary()  # watches by the trained model


class MemfitCallback(Watching, TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Trainer(..., callbacks=[MemfitCallback(predicted="run/recipe.toml")]).

    It takes the arguments of memfit.watch except model and optimizer, which the Trainer provides. `callback.watch` is
    the watch of the last training.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for earlier in (self.watch, _UNDER_WAY[model]() if model in _UNDER_WAY else None):
            if earlier:
                earlier.close()  # its training may have ended in an error, for which no callback is called
        self.watch = watch(model, **self.options)
        if model is not None:
            _UNDER_WAY[model] = ref(self.watch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch:
            self.watch.train()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if self.watch:
            self.watch.optimizer = optimizer
            self.watch.step()
            if control.should_save and not control.should_evaluate:
                self.watch.enter("save")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch:
            self.watch.enter("eval")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch:
            self.watch.enter("save") if control.should_save else self.watch.train()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch:
            self.watch.train()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch:
            self.watch.close()
