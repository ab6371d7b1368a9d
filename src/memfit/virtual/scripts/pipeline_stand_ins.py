"""Stand-ins of diffusers' pipelines: a folder a component, with its config, and weights without data."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.virtual.patching import patched
from memfit.virtual.scripts.stand_ins import tokenizer

_STEPS = 1000  # of the noise of every pipeline in the catalogue


def write(config: dict[str, Any], folder: Path) -> None:
    """Write the components of a pipeline, a tokenizer for each of its text encoders, and its scheduler."""
    import torch

    from memfit.virtual.jobs.diffusion import made
    from memfit.virtual.jobs.models import no_init_weights
    from memfit.virtual.process import sparse_tensors

    parts = {name: part for name, part in config.items() if isinstance(part, dict)}
    for name, part in parts.items():
        (folder / name).mkdir()
        of_diffusers = "_class_name" in part
        with torch.device("meta"), no_init_weights():
            model = made(part).to(torch.bfloat16)
        model.save_config(folder / name) if of_diffusers else model.config.save_pretrained(folder / name)
        file = "diffusion_pytorch_model" if of_diffusers else "model"
        held = ((key, value.dtype, value.shape) for key, value in model.state_dict().items())
        sparse_tensors.write(folder / name / f"{file}.safetensors", held)
        if not of_diffusers:
            place = folder / name.replace("text_encoder", "tokenizer")
            place.mkdir()
            tokenizer(model.config.to_dict(), place)
    flows = "transformer" in parts
    scheduler = {
        "_class_name": "FlowMatchEulerDiscreteScheduler" if flows else "DDPMScheduler", "num_train_timesteps": _STEPS
    }  # fmt: skip
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))


def changes(folder_of: Callable[[Any], Any]) -> dict[str, Callable[[ModuleType], AbstractContextManager[None]]]:
    """Return changes to modules of diffusers, by module: what is loaded by name is read from the name's folder."""

    def loading(base: str) -> Callable[[ModuleType], AbstractContextManager[None]]:
        def change(module: ModuleType) -> AbstractContextManager[None]:
            kind = getattr(module, base)
            real = kind.__dict__["from_pretrained"].__func__

            def from_pretrained(cls: Any, name: Any, *args: Any, **words: Any) -> Any:
                return real(cls, folder_of(name), *args, **words)

            return patched(kind, {"from_pretrained": classmethod(from_pretrained)})

        return change

    return {
        "diffusers.models.modeling_utils": loading("ModelMixin"),
        "diffusers.schedulers.scheduling_utils": loading("SchedulerMixin"),
    }
