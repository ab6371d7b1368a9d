"""What each task trains: the model's class, one sample of it, and TRL's trainers of preferences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from memfit.errors import BadInput
from memfit.nouns.task import USUAL_SECONDS, Task
from memfit.tables.tasks import TASKS, refuse
from memfit.virtual.jobs.sounds import heard

if TYPE_CHECKING:
    from memfit.virtual.jobs.recipe import Setup

PIXELS = 224  # of an image's side where neither the model nor the user says
CTC_TOKENS = 6  # tokens of text per second of speech
WORDS = 1000  # of the tokenizer, each one token
_WITH_ENCODER = (
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
_SPEAK = ("dia", "pop2piano")  # families of transformers' table of speech recognition that make sounds


def can(row: Task, model_type: str) -> bool:
    """Return whether transformers has a class of a family for a task.

    An encoder with a causal head does not count, nor does the decoder alone of a model that has an encoder. Language
    models that hear are in transformers' tables of sequence-to-sequence models, and have no encoder whose text they
    write.
    """
    if row.sample == "noise" or model_type == "diffusers":
        return row.sample == "noise" and model_type == "diffusers"
    if model_type in _SPEAK or model_type not in getattr(modeling_auto, row.mapping):
        return False
    if row.sample in ("text-to-text", "features"):
        return bool(getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False))
    return row.auto != "AutoModelForCausalLM" or all(model_type not in others for others in _WITH_ENCODER)


def of_trl(row: Task, what: str) -> Any:
    """Return TRL's class of a task: what is "Trainer" or "Config". Raises BadInput where the installed TRL has none."""
    import trl

    name = f"{row.trainer}{what}"
    with suppress(AttributeError):
        return getattr(trl, name)
    with suppress(ImportError):
        return getattr(import_module(f"trl.experimental.{row.trainer.lower()}"), name)
    raise BadInput(f"TRL {trl.__version__} has no {name}", hint="pip install -U trl")


def check(row: Task, model_type: str) -> None:
    """Refuse a task without its package, or that the installed transformers has no class for. Raises BadInput."""
    if row.package and find_spec(row.package.replace("-", "_")) is None:
        raise BadInput(f"{row.title} needs {row.package}, which is not installed", hint=f"pip install {row.package}")
    if not can(row, model_type):
        raise refuse(row, f"a {model_type} model", [key for key, other in TASKS.items() if can(other, model_type)])


def configured(setup: Setup, config: Any) -> Any:
    """Set what a task changes in the model's config: its number of labels, and the token that pads texts."""
    row = TASKS[setup.task]
    if row.sample in ("label", "token-labels", "image", "pair"):
        config.num_labels = 1 if row.sample == "pair" else setup.shape.classes
    if row.sample in ("label", "pair") and getattr(config.get_text_config(), "pad_token_id", None) is None:
        config.get_text_config().pad_token_id = 1
    if row.sample in ("text-to-text", "features"):  # labels shifted by one are what the decoder reads
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if row.sample == "waveform":  # as fine-tuning scripts set it: a batch is too short to mask spans of time
        config.mask_time_prob = 0.0
    return config


# --- samples ---


def _ids(count: int) -> Tensor:
    return torch.arange(count) % 900 + 3  # no special token


def padding_of(setup: Setup) -> int:
    """Return the tokens that a text is shorter than the longest of its batch."""
    return min(8, setup.sequence // 4) if setup.shape.padded else 0


def _text(setup: Setup, config: Any) -> dict[str, Tensor]:
    ids = _ids(setup.sequence)
    mask = torch.ones_like(ids)
    if setup.mask == "padded":
        mask[setup.sequence - padding_of(setup) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _label(setup: Setup, config: Any) -> dict[str, Tensor]:
    found = {**_text(setup, config), "labels": torch.tensor(1)}
    if config.is_encoder_decoder:  # which reads a text's class off its last token
        found["input_ids"][-1] = config.eos_token_id
    return found


def _token_labels(setup: Setup, config: Any) -> dict[str, Tensor]:
    return {**_text(setup, config), "labels": torch.zeros(setup.sequence, dtype=torch.long)}


def _text_to_text(setup: Setup, config: Any) -> dict[str, Tensor]:
    return {**_text(setup, config), "labels": _ids(setup.shape.target)}


def _image(setup: Setup, config: Any) -> dict[str, Tensor]:
    own = getattr(config, "image_size", PIXELS) or PIXELS
    tall, wide = own if isinstance(own, list | tuple) else (own, own)
    given_wide, given_tall = setup.shape.image
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.zeros(channels, given_tall or tall, given_wide or wide), "labels": torch.tensor(1)}


def _features(setup: Setup, config: Any) -> dict[str, Tensor]:
    return {**heard(setup, config), "labels": _ids(setup.shape.target)}


def _waveform(setup: Setup, config: Any) -> dict[str, Tensor]:
    seconds = setup.shape.audio_seconds or USUAL_SECONDS
    labels = _ids(max(int(seconds * CTC_TOKENS), 1)) % (config.vocab_size - 1) + 1
    return {**heard(setup, config), "labels": labels}


_SAMPLES: dict[str, Callable[[Setup, Any], dict[str, Tensor]]] = {
    "text": _text, "label": _label, "token-labels": _token_labels, "text-to-text": _text_to_text, "image": _image,
    "features": _features, "waveform": _waveform,
}  # fmt: skip


def sample_of(setup: Setup, config: Any) -> dict[str, Tensor]:
    """Return one sample of the task, as its collator stacks them."""
    return _SAMPLES[TASKS[setup.task].sample](setup, config)


def batch_of_one(setup: Setup, config: Any) -> dict[str, Tensor]:
    """Return one sample of the task as a batch. [1, ...]"""
    if TASKS[setup.task].sample == "pictures":
        from memfit.virtual.jobs import pictures

        return pictures.batch_of_one(setup, config)
    return {name: value[None] for name, value in sample_of(setup, config).items()}


# --- preferences ---


def words() -> Any:
    """Return a tokenizer whose words are w0, w1, ..., each one token. It reads a text once: all rows have the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<pad>", "<s>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    read = dict[str, Any]()

    class Words(PreTrainedTokenizerFast):
        def __call__(self, text: Any = None, **words: Any) -> Any:
            if not isinstance(text, str) or words:
                return super().__call__(text, **words)
            if text not in read:
                read[text] = super().__call__(text)
            return read[text].copy()

    return Words(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<s>")


def text(tokens: int) -> str:
    """Return a text of so many tokens."""
    return " ".join(f"w{i % WORDS}" for i in range(tokens))


def _written(tokens: int) -> str:
    """Return a text of so many tokens with the one that TRL puts at its end."""
    return text(tokens - 1)


def compared(setup: Setup, good: bool = True) -> dict[str, Any]:
    """Return a row of texts that takes the setup's sequence length; of answers a good or a bad one."""
    half, short = setup.sequence // 2, padding_of(setup)
    # some trainers join prompt and answer before they tokenize them
    answer, prompt = " " + _written(setup.sequence - half), " ".join(["w1"] * half)
    shorter = " " + _written(setup.sequence - half - short)
    kind = TASKS[setup.task]
    if kind.sample == "prompt":
        return {"prompt": " ".join(["w1"] * setup.shape.prompt)}
    if kind.sample == "anchor":
        return {"anchor": text(setup.sequence), "positive": text(setup.sequence)}
    if kind.sample == "pair":
        return {"chosen": _written(setup.sequence), "rejected": _written(setup.sequence - short)}
    if kind.trainer == "KTO":
        return {"prompt": prompt, "completion": answer if good else shorter, "label": good}
    return {"prompt": prompt, "chosen": answer, "rejected": shorter}
