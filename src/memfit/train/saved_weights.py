"""The weights of a checkpoint, put back as they were: experts that saving takes apart are whole again, adapters keep their numbers' format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.errors import BadInput


def mend_loading(trainer: Any) -> None:
    """From now on `trainer` resumes with the weights that it saved, all of them, or says which are missing.

    Left alone transformers 5.23 reads a full checkpoint by its own names, and `save_pretrained` has others for experts: they
    and routers stay those of the base (its issue 48805). PEFT reads adapters in 16 bits as float32.
    """
    trainer._load_from_checkpoint = _mended(trainer, trainer._load_from_checkpoint)


def _mended(trainer: Any, load: Callable[..., None]) -> Callable[..., None]:
    def loaded(checkpoint: str, model: Any = None) -> None:
        target = trainer.model if model is None else model
        formats = {name: weight.dtype for name, weight in target.named_parameters()}
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        saved = set() if sharded else _saved(Path(checkpoint))
        if saved and not {name for name, _ in target.named_parameters()} <= saved:
            _read_as_saved(target, checkpoint)
        else:
            load(checkpoint, model)
        for name, weight in target.named_parameters():
            if weight.dtype != formats.get(name, weight.dtype):
                weight.data = weight.data.to(formats[name])

    return loaded


def _saved(checkpoint: Path) -> set[str]:
    """The names of a whole model's weights, in one file or several; none where there are adapters only."""
    from safetensors import safe_open

    names = set[str]()
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def _read_as_saved(model: Any, checkpoint: str) -> None:
    """By from_pretrained, which undoes what save_pretrained does. Raises BadInput where weights are missing even so."""
    saved, told = type(model).from_pretrained(checkpoint, dtype="auto", device_map=None, output_loading_info=True)
    result = model.load_state_dict(saved.state_dict(), strict=False)
    missing = sorted({*told["missing_keys"], *result.missing_keys, *result.unexpected_keys})
    if missing:
        shown = ", ".join(missing[:3])
        raise BadInput(
            f"{checkpoint} does not hold the weights of this model ({len(missing)} differ: {shown})",
            hint="start the run again with --force",
        )
