"""Stand-ins for a named model's files: weights by its own class, a tokenizer, image processors, feature extractors."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

CHARACTERS = 4  # per token of the stand-in; English text has 4 to 4.5 with vocabularies since 2023
_PADDED = ("qwen", "gemma")  # families whose tokenizers have a pad token that configs do not name

# --- the class whose weights are published ---

_AUTO = (  # what a config without `architectures`, or with one of the Hub's own code, may be built by
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq", "AutoModelForImageClassification", "AutoModelForCTC", "AutoModel",
)  # fmt: skip


def builder(config: Any) -> Any:
    """Return what makes the published model from a config: the class it names, or the first Auto class that knows it.

    Both are called with `_from_config`; a model whose code is on the Hub alone has neither, and gives None.
    """
    import transformers

    for name in config.architectures or ():
        if found := getattr(transformers, name, None):
            return found._from_config
    autos = (getattr(transformers, name, None) for name in _AUTO)
    return next((auto.from_config for auto in autos if auto and type(config) in auto._model_mapping), None)


# --- tokenizers ---

# prefix of model types -> (keys of the config that give the id, the token's text, the tokenizer's attribute for it)
_NAMED: dict[str, tuple[tuple[tuple[str, ...], str, str], ...]] = {
    "qwen": (
        (("image_token_id",), "<|image_pad|>", ""), (("video_token_id",), "<|video_pad|>", ""),
        (("vision_start_token_id",), "<|vision_start|>", ""), (("vision_end_token_id",), "<|vision_end|>", ""),
    ),
    "gemma3": (
        (("image_token_index", "image_token_id"), "<image_soft_token>", "image_token"),
        (("boi_token_index",), "<start_of_image>", "boi_token"), (("eoi_token_index",), "<end_of_image>", "eoi_token"),
    ),
    "mistral3": ((("image_token_index", "image_token_id"), "[IMG]", ""),),
    "pixtral": ((("image_token_index", "image_token_id"), "[IMG]", ""),),
    "whisper": (),
    "": (
        (("image_token_index", "image_token_id"), "<image>", "image_token"),
        (("video_token_index", "video_token_id"), "<video>", "video_token"),
        (("audio_token_index", "audio_token_id"), "<audio>", "audio_token"),
    ),
}  # fmt: skip
# (prefix of model types, least vocabulary, id -> text): tokens that scripts ask for by name, of the published
# tokenizer_config.json; a script that finds one missing adds it, and so makes the embedding larger
_PUBLISHED: tuple[tuple[str, int, dict[int, str]], ...] = (
    ("qwen", 151646, {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}),
    ("llama", 128256, {
        128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128004: "<|finetune_right_pad_id|>",
        128006: "<|start_header_id|>", 128007: "<|end_header_id|>", 128008: "<|eom_id|>", 128009: "<|eot_id|>",
    }),
    ("llama", 32000, {0: "<unk>", 1: "<s>", 2: "</s>"}),
    ("mistral", 32000, {0: "<unk>", 1: "<s>", 2: "</s>"}),
    ("gpt2", 50257, {50256: "<|endoftext|>"}),
    *((kind, 28996, {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"})
      for kind in ("bert", "distilbert")),
    ("deberta-v2", 128001, {0: "[PAD]", 1: "[CLS]", 2: "[SEP]", 3: "[UNK]", 128000: "[MASK]"}),
    ("modernbert", 50285, {50280: "[UNK]", 50281: "[CLS]", 50282: "[SEP]", 50283: "[PAD]", 50284: "[MASK]"}),
    ("roberta", 50265, {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>", 50264: "<mask>"}),
    ("xlm-roberta", 250002, {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>", 250001: "<mask>"}),
)  # fmt: skip
_ROLES = {
    "[MASK]": "mask", "<mask>": "mask", "[CLS]": "cls", "[SEP]": "sep", "[PAD]": "pad", "[UNK]": "unk", "<unk>": "unk",
}  # fmt: skip
# what a chat template writes for an image; other families write the first token above
_IMAGE = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>"}
# Mistral's tokens after [IMG]; Whisper's special tokens, counted from the end of its vocabulary
_AFTER_IMG = {2: "[IMG_BREAK]", 3: "[IMG_END]"}
_WHISPER = {
    -1507: "<|translate|>", -1506: "<|transcribe|>", -1505: "<|startoflm|>", -1504: "<|startofprev|>",
    -1503: "<|nospeech|>", -1502: "<|notimestamps|>",
}  # fmt: skip


def tokenizer(config: dict[str, Any], folder: Path) -> None:
    """Write a tokenizer with the model's vocabulary size that makes one token of every CHARACTERS characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    size = config["vocab_size"]
    words = {i: f"<{i}>" for i in range(size)}
    named, attributes = _named_tokens(config)
    published = _published(config)
    words |= published | named
    special = {"eos_token": words[size - 1]}  # every tokenizer has one; the config may name another
    special |= {f"{_ROLES[word]}_token": word for word in published.values() if word in _ROLES}
    for role in ("bos", "eos", "pad"):
        number = config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) else number
        if isinstance(number, int) and 0 <= number < size:
            special[f"{role}_token"] = words[number]
    if config["model_type"].startswith(_PADDED):
        special.setdefault("pad_token", words[size - 1])
    taken = {*special.values(), *named.values(), *published.values()}
    plain = next(word for word in words.values() if word not in taken)  # of which all text is made
    special.setdefault("unk_token", plain)
    made = Tokenizer(models.WordLevel({word: i for i, word in words.items()}, unk_token=plain))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{CHARACTERS}}}"), "isolated")
    made.add_special_tokens(sorted({*special.values(), *named.values(), *published.values()}))
    made.save(str(folder / "tokenizer.json"))
    chat = _chat(config, named)
    about = {
        "tokenizer_class": "WhisperTokenizer" if config["model_type"] == "whisper" else "PreTrainedTokenizerFast",
        "chat_template": chat,
        "model_max_length": _longest(config), **special,
        **({"extra_special_tokens": attributes} if attributes else {}),
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(chat)  # where processors look for it


def _longest(config: dict[str, Any]) -> int:
    """Return the most tokens of a text; RoBERTa's positions begin after the number of its pad token."""
    positions = int(config.get("max_position_embeddings") or 1 << 20)
    return positions - config["pad_token_id"] - 1 if "roberta" in config["model_type"] else positions


def _family(config: dict[str, Any], table: dict[str, Any]) -> Any:
    return next((row for prefix, row in table.items() if config["model_type"].startswith(prefix)), None)


def _published(config: dict[str, Any]) -> dict[int, str]:
    """Return tokens of the model's published tokenizer, id -> text."""
    kind, size = config["model_type"], config["vocab_size"]
    return next((known for prefix, least, known in _PUBLISHED if kind.startswith(prefix) and size >= least), {})


def _named_tokens(config: dict[str, Any]) -> tuple[dict[int, str], dict[str, str]]:
    """Return the tokens that the model's processor looks for by name: id -> text, and the tokenizer's attributes."""
    size, named, attributes = config["vocab_size"], dict[int, str](), dict[str, str]()
    for keys, text, attribute in _family(config, _NAMED):
        number = next((config[key] for key in keys if isinstance(config.get(key), int)), -1)
        if 0 <= number < size:
            named[number] = text
            attributes |= {attribute: text} if attribute else {}
    named |= {i + after: text for i in list(named) if named[i] == "[IMG]" for after, text in _AFTER_IMG.items()}
    if config["model_type"] == "whisper" and size > -min(_WHISPER):
        named |= {size + before: text for before, text in _WHISPER.items()}
        named[config["pad_token_id"] + 1] = "<|startoftranscript|>"  # after <|endoftext|>, with which it pads
    return named, attributes


_CHAT = (
    "{{{{ bos_token }}}}{{% for message in messages %}}{{{{ '### ' + message['role'] + '\n' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% elif part['type'] == 'image' %}}{{{{ '{image}' }}}}"
    "{{% endif %}}{{% endfor %}}{{% endif %}}"
    "{{{{ eos_token if message['role'] == 'assistant' else '' }}}}{{{{ '\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '### assistant\n' }}}}{{% endif %}}"
)


def _chat(config: dict[str, Any], named: dict[int, str]) -> str:
    return _CHAT.format(image=_family(config, _IMAGE) or next(iter(named.values()), ""))


def tokenizer_class(wanted: Any) -> Any:
    """Return the class that loads a stand-in tokenizer: the model's own would expect its own files.

    Whisper's has methods that scripts call, so that class is kept, and only its construction is PyTorch's plain one.
    """
    plain = import_module("transformers").PreTrainedTokenizerFast
    if not wanted.__name__.startswith("WhisperTokenizer") or not issubclass(wanted, plain):
        return plain

    def plainly(
        self: Any, *args: Any, language: Any = None, task: Any = None, predict_timestamps: bool = False, **words: Any
    ) -> None:
        plain.__init__(self, *args, **words)
        self.language, self.task, self.predict_timestamps = language, task, predict_timestamps
        self.set_prefix_tokens()

    return type(wanted.__name__, (wanted,), {"__init__": plainly, "convert_to_native_format": _as_it_is(plain)})


def _as_it_is(plain: Any) -> Any:
    """Return the plain class's conversion, which reads the file as it is; None for versions that have none."""
    convert = getattr(plain, "convert_to_native_format", None)
    return classmethod(lambda cls, *args, **words: convert(*args, **words)) if convert else None


# --- images and sound ---

# least and most pixels of an image, as in the preprocessor_config.json that Qwen publishes with the models
_QWEN2_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
_QWEN3_PIXELS = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}


def processors(config: dict[str, Any], folder: Path) -> str:
    """Write the files that processors of images and sound are made from; return what was made."""
    auto = "transformers.models.auto."
    kind = config["model_type"]
    image = _named_in(f"{auto}image_processing_auto", "IMAGE_PROCESSOR_MAPPING_NAMES", kind)
    video = _named_in(f"{auto}video_processing_auto", "VIDEO_PROCESSOR_MAPPING_NAMES", kind)
    sound = _named_in(f"{auto}feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES", kind)
    whole = _named_in(f"{auto}processing_auto", "PROCESSOR_MAPPING_NAMES", kind)
    if not (image or sound):
        return ""
    vision = config.get("vision_config") or config
    about: dict[str, Any] = {"processor_class": whole} if whole else {}
    if image:
        about |= {"image_processor_type": image, **_pixels(image, vision, kind)}
    if sound:
        about |= {"feature_extractor_type": sound}
        about |= {"feature_size": config["num_mel_bins"]} if "num_mel_bins" in config else {}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    if video:
        moving = {**about, "video_processor_type": video}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(moving))
    if whole:
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": whole, **_lengths(config, vision)})
        )
    return " and ".join(["image processor"] * bool(image) + ["feature extractor"] * bool(sound))


def _named_in(module: str, table: str, kind: str) -> str:
    """Return a class's name from one of transformers' tables, whose rows are names, or (slow, fast), or by backend."""
    try:
        row = getattr(import_module(module), table).get(kind)
    except (ImportError, AttributeError):
        return ""
    if isinstance(row, dict):
        row = row.get("torchvision") or row.get("pil")
    return str((row[0] or row[-1] if isinstance(row, list | tuple) else row) or "")


def _pixels(name: str, vision: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the sizes of an image processor that follow from the vision model's config."""
    side, patch = vision.get("image_size"), vision.get("patch_size")
    side = max(side) if isinstance(side, list) else side
    if name.startswith("Qwen2VL"):
        merge, frames = vision.get("spatial_merge_size", 2), vision.get("temporal_patch_size", 2)
        size = _QWEN2_PIXELS if kind.startswith("qwen2") else _QWEN3_PIXELS
        return {"patch_size": patch or 14, "merge_size": merge, "temporal_patch_size": frames, "size": size}
    if not isinstance(side, int):
        return {}
    square = {"height": side, "width": side}
    if name.startswith("Pixtral"):
        return {"size": {"longest_edge": side}, "patch_size": {"height": patch, "width": patch}}
    if name.startswith(("CLIP", "Llava")):
        return {"size": {"shortest_edge": side}, "crop_size": square}
    return {"size": square}


def _lengths(config: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a processor that decide how many tokens an image has."""
    kind = config["model_type"]
    if kind.startswith("gemma3"):
        return {"image_seq_length": config.get("mm_tokens_per_image", 256)}
    if kind in ("mistral3", "pixtral"):
        return {"patch_size": vision.get("patch_size", 16), "spatial_merge_size": config.get("spatial_merge_size", 1)}
    if kind.startswith("llava"):
        strategy = config.get("vision_feature_select_strategy", "default")
        return {"patch_size": vision.get("patch_size", 14), "vision_feature_select_strategy": strategy}
    return {}


_ENGLISH = 51864  # entries of Whisper's English vocabulary; another is multilingual, with one more for each language
_FIRST_LANGUAGE = 50259  # Whisper's number of its first language; those of the tasks follow the languages


def generation_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return Whisper's generation_config.json, without which it does not generate; nothing for other models."""
    if config["model_type"] != "whisper":
        return {}
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    size = config["vocab_size"]
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "suppress_tokens")
    settings = {name: config[name] for name in (*kept, "begin_suppress_tokens") if config.get(name) is not None}
    settings |= {"max_length": config.get("max_target_positions", 448), "is_multilingual": size > _ENGLISH}
    if size <= _ENGLISH:
        return settings | {"no_timestamps_token_id": 50362}
    languages = list(LANGUAGES)[: size - _ENGLISH + 98]
    after = _FIRST_LANGUAGE + len(languages)
    return settings | {
        "lang_to_id": {f"<|{code}|>": _FIRST_LANGUAGE + i for i, code in enumerate(languages)},
        "task_to_id": {"translate": after, "transcribe": after + 1},
        "prev_sot_token_id": after + 3, "no_timestamps_token_id": after + 5,
    }  # fmt: skip


# --- pipelines of diffusers ---

_STEPS = 1000  # of the noise of every pipeline in the catalogue


def pipeline(config: dict[str, Any], folder: Path) -> None:
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
