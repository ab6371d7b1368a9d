"""Read the files of SimpleTuner and of kohya's sd-scripts as text-to-image training, and say a plan in their keys.

Both train as the loop of diffusers' scripts does, which memfit traces, on latents and embeddings that they prepare
ahead. What they do beside it (images made to validate, blocks swapped to the host, most quantised bases, LyCORIS) is
not counted: such keys are reported as not understood.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import TRACE_SCRIPT, BadInput, Unsupported
from memfit.frameworks.keys import Adopted, Key, Keys, KeyTable, build, parse, short, words
from memfit.frameworks.text_edit import KeyPath
from memfit.models.hub import resolve_config
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.nouns.task import Shape
from memfit.tables.pipelines import KANDINSKY, pipeline

TASK = "text-to-image"
_MIXED = {"bf16": "bf16", "fp16": "fp16-mixed", "no": "fp32", "fp32": "fp32"}


def _method(keys: Keys, usual: str, adapted: bool, whole: str) -> dict[str, Any]:
    """Return method and precision, the tool's `usual` one where none is set; adapters lie beside 16-bit weights.

    whole: what "bf16" means where all weights are trained.
    """
    key = "mixed_precision"
    named = str(keys.take(key, default=usual))
    if named not in _MIXED or (named == "fp16" and not adapted and whole == "bf16"):  # weights in fp16
        keys.not_expressed(key)
    precision = _MIXED.get(named, "bf16")
    if not adapted and precision == "bf16":
        precision = whole
    return {"method": "lora" if adapted else "full", "precision": precision}


def _mixed(recipe: Recipe, whole: str) -> str:
    """Return a precision in the tool's word. Raises Unsupported."""
    own = whole if recipe.method == "full" else "bf16"
    named = {own: "bf16", "fp32": "no"}
    if recipe.method != "full" or whole != "bf16":  # whose 16-bit weights an fp32 loss scaler does not serve
        named["fp16-mixed"] = "fp16"
    if recipe.precision not in named:
        raise Unsupported(f"image trainers do not train in {recipe.precision}", hint=f"--precision {own}")
    return named[recipe.precision]


def _optimizer(keys: Keys, key: str, known: Mapping[str, str], default: str) -> str:
    """Return the optimizer; one that is not in the table is reported, and counted as the default."""
    named = str(keys.take(key, default=default)).lower()
    if named not in known:
        keys.inexpressible.append(key)
    return known.get(named, known[default])


def _named(recipe: Recipe, tool: str, known: Mapping[str, str], default: str) -> str:
    """Return the tool's name of an optimizer. Raises Unsupported."""
    found = next((theirs for theirs, ours in known.items() if ours == recipe.optimizer), None)
    if found is None:
        raise Unsupported(f"memfit knows no {recipe.optimizer} of {tool}", hint=f"--optimizer {known[default]}")
    return found


def _check(recipe: Recipe, tool: str) -> None:
    """Refuse what no key that memfit reads switches on. Raises Unsupported."""
    refused = (
        (recipe.attention != "sdpa", f"attention {recipe.attention}", "--attention sdpa"),
        (recipe.compile, "compilation", "--no-compile"),
        (recipe.checkpointing not in ("none", "full"), f"{recipe.checkpointing} checkpointing", "--checkpointing full"),
        (recipe.shard != "none", "sharding", "--shard none"),
        (recipe.offload != "none", "offloading", "--offload none"),
        (recipe.context_parallel > 1, "context parallelism", "--context-parallel 1"),
        (bool(recipe.modules_to_save), "modules trained whole beside adapters", "leave out --modules-to-save"),
    )
    for wrong, what, hint in refused:
        if wrong:
            raise Unsupported(f"memfit writes no {what} into a file of {tool}", hint=hint)


def _placed(settings: Mapping[str, Any], places: Mapping[str, tuple[str, ...]], prefix: str = "") -> dict[str, Any]:
    """Return settings as the user's file has them: spelled alike, in the same sections."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        *above, key = places.get(name, (prefix + name,))
        inner = found.setdefault(above[0], {}) if above else found
        inner[key] = value
    return found


def _adopted(
    format: str, keys: Keys, harmless: tuple[str, ...], changes: dict[str, Any], side: int, model: str | None,
    assumed: tuple[str, ...], text: int = 0,
) -> Adopted:  # fmt: skip
    ignored, unknown = keys.rest(harmless)
    return Adopted(
        format=format, recipe=build(keys.where, changes), model=model, task=TASK,
        shape=Shape(image=(side, side) if side else (0, 0), cached=True, text=text),
        stated=tuple(changes), assumed=assumed, ignored=ignored, unknown=unknown,
    )  # fmt: skip


# ---- SimpleTuner 4

SIMPLETUNER = "simpletuner"
_MARKS = {
    "model_family", "data_backend_config", "instance_prompt", "lora_type", "caption_dropout_probability",
    "minimum_image_size", "validation_prompt",
}  # fmt: skip
# family -> flavour -> model of the catalogue; "": where the file names none
FAMILIES: dict[str, dict[str, str]] = {
    "sd1x": {"": "stable-diffusion-v1-5", "1.5": "stable-diffusion-v1-5", "dreamshaper": "stable-diffusion-v1-5"},
    "sdxl": {"": "stable-diffusion-xl-base-1.0", "base-1.0": "stable-diffusion-xl-base-1.0"},
    "kolors": {"": "kolors", "1.0": "kolors"},
    "sd3": {"": "stable-diffusion-3.5-medium", "medium": "stable-diffusion-3.5-medium",
            "large": "stable-diffusion-3.5-large"},
    "flux": {"": "flux.1-dev", "dev": "flux.1-dev", "schnell": "flux.1-schnell"},
    "flux2": {"": "flux.2-dev", "dev": "flux.2-dev"},
    "pixart_sigma": {"": "pixart-sigma"},
    "sana": {"": "sana-1.6b", "1.6b-1024": "sana-1.6b"},
    "auraflow": {"": "auraflow-v0.3", "v0.3": "auraflow-v0.3", "v0.2": "auraflow-v0.3"},
    "lumina2": {"": "lumina-image-2.0", "2.0": "lumina-image-2.0"},
    "chroma": {"": "chroma1-hd", "base": "chroma1-hd", "hd": "chroma1-hd"},
    "cosmos": {"": "cosmos-predict2-2b", "2b": "cosmos-predict2-2b", "14b": "cosmos-predict2-14b"},
    "kandinsky5_image": {"": "kandinsky-5-t2i-lite", "t2i-lite-sft": "kandinsky-5-t2i-lite",
                         "t2i-lite-pretrain": "kandinsky-5-t2i-lite"},
    "omnigen": {"": "omnigen-v1", "v1": "omnigen-v1"},
    "qwen_image": {"": "qwen-image", "v1.0": "qwen-image"},
    "z_image": {"": "z-image-turbo", "turbo": "z-image-turbo"},
}  # fmt: skip
_TARGETS = ("to_k", "to_q", "to_v", "to_out.0")  # of most families
_OTHER_TARGETS = {"auraflow": (*_TARGETS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
                  "kandinsky5_image": KANDINSKY[:3]}  # fmt: skip
# tokens to which its families pad texts, where diffusers does not; SD3's are 77 of CLIP and 154 of T5
_TEXTS = {"auraflow": 120, "qwen_image": 1024, "kandinsky5_image": 256, "kolors": 77, "sd3": 231}
# base_model_precision -> --quantization; SDNQ's with what makes it 8-bit products of rotated rows, compiled
_BASES = {"fp8-torchao": "fp8-torchao", "fp8wo-torchao": "fp8w-torchao", "int8-sdnq": "int8-sdnq",
          "nf4-bnb": "nf4-double"}  # fmt: skip
_ROTATED = {"sdnq_use_hadamard": True, "sdnq_hadamard_group_size": 256, "sdnq_group_size": -1,
            "sdnq_use_quantized_matmul": True, "sdnq_compile_mode": "compile"}  # fmt: skip
_SIMPLETUNER_OPTIMIZERS = {
    "adamw_bf16": "adamw-bf16", "torch-adamw": "adamw", "optimi-adamw": "adamw-bf16", "bnb-adamw": "adamw-32bit",
    "bnb-adamw8bit": "adamw-8bit", "bnb-adamw-paged": "paged-adamw-32bit", "bnb-adamw8bit-paged": "paged-adamw-8bit",
    "bnb-lion": "lion", "optimi-lion": "lion", "bnb-lion8bit": "lion-8bit",
}  # fmt: skip
# its other keys that say a field of the recipe; what it trains whole in bf16 has weights of 16 bits
_SIMPLETUNER = KeyTable(
    Key("micro_batch", "train_batch_size", 4),
    Key("accumulation", "gradient_accumulation_steps", 1),
    Key("keep_gradients", "set_grads_to_none", False, values={True: False, False: True}),
    Key("num_gpus", "num_processes", 1),
    Key("lora_rank", "lora_rank", 16),
    Key("lora_dropout", "lora_dropout", 0.1),
)
_INTERVAL, _STRIDE = "gradient_checkpointing_interval", "gradient_checkpointing_segment_stride"
_CHECKPOINTS = (_INTERVAL, _STRIDE, "gradient_checkpointing_backend")
_SIMPLETUNER_HARMLESS = words("""
    output_dir seed num_train_epochs max_train_steps learning_rate lr_* checkpoint* report_to hub_* push_* tracker_*
    vae_batch_size vae_enable_* vae_cache_ondemand text_encoder_batch_size text_encoder_*_precision
    text_cache_ondemand
    disable_bucket_pruning disable_benchmark compress_disk_cache caption_dropout_probability resume_from_checkpoint
    flow_* minimum_image_size resolution_type grad_clip_method max_grad_norm strict_epoch_limit skip_file_discovery
    offload_during_startup aspect_bucket_* allow_dataset_oversubscription delete_problematic_images lora_format
    data_backend_* model_flavour snr_gamma instance_prompt num_workers logging_* cache_dir* preserve_data_backend_cache
    loss_type metadata_update_interval override_dataset_config ignore_final_epochs trust_remote_code
    validation_guidance* validation_num_inference_steps validation_seed validation_negative_prompt
    validation_resolution validation_disable_unconditional validation_prompt_library lora_initialisation_style
""")


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys as words: files of SimpleTuner may write them as on its command line."""
    return {str(key).lstrip("-").replace("-", "_"): value for key, value in data.items()}


def is_simpletuner(data: dict[str, Any]) -> bool:
    """Return whether a file is SimpleTuner's config.json."""
    return len(_plain(data).keys() & _MARKS) > 1


def simpletuner(data: dict[str, Any], path: Path) -> Adopted:
    """Return the content of a config.json of SimpleTuner. Raises BadInput, and Unsupported for unknown families."""
    keys = Keys(_plain(data), str(path))
    family, flavour = (
        (keys.text("model_family") or "").replace("-", "_"),
        str(keys.take("model_flavour", default="")).lower(),
    )
    if family not in FAMILIES:
        raise Unsupported(
            f"{path} trains a model of SimpleTuner's family {short(family)}, which memfit does not plan",
            hint=f"{TRACE_SCRIPT}; planned are {', '.join(FAMILIES)}",
        )
    if flavour not in FAMILIES[family]:
        keys.inexpressible.append("model_flavour")
    model = _model(family, flavour)
    own = keys.take("pretrained_model_name_or_path")
    assumed = [f"{own} is built as {model}"] if own else []
    adapted = keys.take("model_type", default="full") == "lora"
    if adapted and _assisted(model, keys):
        assumed.append(f"the frozen adapter that SimpleTuner puts beside {model} is not counted")
    changes = {
        **_method(keys, "bf16", adapted, whole="bf16"), **_base(keys, model, adapted),
        **_texts(keys, path),
        **_adapter(keys, family, path),
        "optimizer": _optimizer(keys, "optimizer", _SIMPLETUNER_OPTIMIZERS, "adamw_bf16"),
        **_SIMPLETUNER.read(keys, "micro_batch", "accumulation", "keep_gradients", "num_gpus"),
        **_blocks(keys, model, assumed),
    }  # fmt: skip
    if not keys.flag("validation_disable"):
        keys.not_expressed("validation_steps", "validation_step_interval")
    keys.take("validation_prompt", "validation_steps", "validation_step_interval", "num_eval_images")
    if keys.take("dynamo_backend", default="no") != "no":
        keys.inexpressible.append("dynamo_backend")
    side, said = _sides(keys, path)
    padded = _TEXTS.get(family, 0)
    return _adopted(SIMPLETUNER, keys, _SIMPLETUNER_HARMLESS, changes, side, model, (*assumed, said), padded)


# what a lycoris_config.json may hold beside its targets, and what memfit counts: LoKr in bypass mode
_LOKR = {"algo", "bypass_mode", "multiplier", "full_matrix", "linear_dim", "linear_alpha", "factor", "apply_preset"}
_WHOLE = 1 << 16  # a rank above which a matrix is not made of two


def _adapter(keys: Keys, family: str, path: Path) -> dict[str, Any]:
    """Return size, dropout and targets of the adapters; LyCORIS' other kinds are reported, and counted as LoRA."""
    sizes = _SIMPLETUNER.read(keys, "lora_rank", "lora_dropout")
    lora = {
        **sizes, "lora_alpha": keys.number("lora_alpha", default=sizes["lora_rank"]),
        "lora_targets": _OTHER_TARGETS.get(family, _TARGETS),
    }  # fmt: skip
    named = keys.text("lycoris_config") or ""
    if str(keys.take("lora_type", default="standard")) == "standard":
        return lora
    file = _beside(path, named)
    data = parse(file) if file else None
    preset = data.get("apply_preset") if isinstance(data, Mapping) else None
    whole = Keys(data if isinstance(data, Mapping) else {}, str(file))
    own = Keys(preset if isinstance(preset, Mapping) else {}, str(file))
    names, each = own.take("target_module", default=[]), own.take("module_algo_map", default={})
    counted = {*whole.data} <= _LOKR and whole.take("algo") == "lokr" and whole.take("bypass_mode") is True
    if not counted or own.rest(())[1] or not names or not isinstance(names, list) or not isinstance(each, Mapping):
        keys.inexpressible.append("lycoris_config")
        return lora
    usual, found = whole.number("factor", default=-1), []
    for name in names:
        one = each.get(name)
        factor = Keys(one if isinstance(one, Mapping) else {}, str(file)).number("factor", default=usual)
        found.append(f"{name}:{factor}".replace(":-1", ""))
    rank = _WHOLE if whole.flag("full_matrix") else whole.number("linear_dim", default=4)
    return {"adapter": "lokr", "lora_rank": rank, "lora_targets": tuple(found)}


def _beside(path: Path, named: str) -> Path | None:
    """Return the file that another one names, as it is given or beside the other; None where there is none."""
    places = [Path(named), path.parent / named, path.parent / Path(named).name] if named else []
    return next((place for place in places if place.is_file()), None)


def _blocks(keys: Keys, model: str, assumed: list[str]) -> dict[str, Any]:
    """Return which blocks are checkpointed; models that have no groups of them checkpoint each."""
    if not keys.flag("gradient_checkpointing", default=True):
        keys.take(*_CHECKPOINTS)
        return {"checkpointing": "none"}
    if keys.take("gradient_checkpointing_backend", default="torch") != "torch":
        keys.inexpressible.append("gradient_checkpointing_backend")
    interval, stride = keys.number(_INTERVAL, default=1), keys.number(_STRIDE, default=0)
    kind = pipeline(resolve_config(model))
    if interval > 1 and not (kind.segments or kind.alternating):
        assumed.append(f"{_INTERVAL} has no effect on {model}")
        interval = 1
    return {"checkpointing": "full", "checkpoint_interval": interval,
            "checkpoint_stride": stride if interval > 1 else 0}  # fmt: skip


_ASSISTED = ("z-image-turbo", "flux.1-schnell")  # beside which a second, frozen adapter is loaded


def _model(family: str, flavour: str) -> str:
    return FAMILIES[family].get(flavour) or FAMILIES[family][""]


def _assisted(model: str, keys: Keys) -> bool:
    return model in _ASSISTED and not keys.flag("disable_assistant_lora")


def _base(keys: Keys, model: str, adapted: bool) -> dict[str, Any]:
    """Return how the frozen base is quantised; what memfit does not know is reported, and counted in 16 bits.

    torchao also quantises a second, frozen adapter, whose copies of its inputs are not counted. All bases but those of
    bitsandbytes are quantised on the host: on the card all weights would lie in 16 bits first.
    """
    named = str(keys.take("base_model_precision", default="no_change")).lower()
    rotated = {key: keys.take(key) for key in _ROTATED} == _ROTATED
    where = keys.take("quantize_via", default="accelerator")
    if named == "no_change":
        return {}
    if not adapted or named not in _BASES or (named == "int8-sdnq" and not rotated):
        keys.inexpressible.append("base_model_precision")
        return {}
    if named.startswith("fp8") and _assisted(model, keys):
        keys.inexpressible.append("assistant_lora_path")
    if where != "cpu" and named != "nf4-bnb":
        keys.inexpressible.append("quantize_via")
    return {"method": "qlora", "quantization": _BASES[named]}


def simpletuner_settings(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's settings in the words of the user's file, whose content is `data`. Raises Unsupported.

    A key that says nothing beside the others stays as the file has it, so that it changes only where it would.
    """
    recipe = plan.recipe
    _check(recipe, "SimpleTuner")
    of_file = _plain(data)
    found = {
        "model_type": "full" if recipe.method == "full" else "lora",
        **_SIMPLETUNER.write(recipe, "micro_batch", "accumulation", "keep_gradients", "num_gpus"),
        "optimizer": _named(recipe, "SimpleTuner", _SIMPLETUNER_OPTIMIZERS, "adamw_bf16"),
        **_checkpoints(recipe, of_file), **_stored(recipe, of_file), **_adapters(recipe, of_file),
        "mixed_precision": _mixed(recipe, whole="bf16"),
    }  # fmt: skip
    places = {name: (key,) for key in data for name in _plain({key: None})}  # of a key that stands twice, the last
    return _placed(found, places, "--" if all(key.startswith("--") for key in data) else "")


def _kept(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: data[name] for name in names if name in data}


def _checkpoints(recipe: Recipe, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return which blocks are checkpointed, as `_blocks` reads it."""
    if recipe.checkpointing == "none":
        return {"gradient_checkpointing": False, **_kept(data, *_CHECKPOINTS)}
    if recipe.checkpoint_interval == 1:
        return {"gradient_checkpointing": True, **_kept(data, _STRIDE)}
    stride = {_STRIDE: recipe.checkpoint_stride} if recipe.checkpoint_stride else {}
    return {"gradient_checkpointing": True, _INTERVAL: recipe.checkpoint_interval, **stride}


def _stored(recipe: Recipe, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the frozen base is quantised, as `_base` reads it. Raises Unsupported."""
    key = "base_model_precision"
    if recipe.quantization == "none":
        return {key: "no_change", **_kept(data, "quantize_via", *_ROTATED)}
    named = next((theirs for theirs, ours in _BASES.items() if ours == recipe.quantization), None)
    if named is None:
        hint = f"--quantization {' or '.join(_BASES.values())}"
        raise Unsupported(f"memfit knows no {recipe.quantization} of SimpleTuner", hint=hint)
    if named == "nf4-bnb":
        return {key: named, **_kept(data, "quantize_via", *_ROTATED)}
    family, flavour = (str(data.get(name) or "") for name in ("model_family", "model_flavour"))
    model = _model(family.replace("-", "_"), flavour.lower())
    if named.startswith("fp8") and data.get(key) != named and _assisted(model, Keys(data, "the file")):
        why = f"SimpleTuner quantises its second adapter of {model} to {named}, too, whose layers are not counted"
        raise Unsupported(why, hint="--quantization nf4-double or int8-sdnq")
    return {key: named, "quantize_via": "cpu", **(_ROTATED if named == "int8-sdnq" else _kept(data, *_ROTATED))}


def _adapters(recipe: Recipe, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return size and dropout of the adapters; those of LyCORIS are said by a file of its own. Raises Unsupported."""
    lycoris = str(data.get("lora_type") or "standard") != "standard"
    if recipe.method == "full" or (recipe.adapter == "lokr" and lycoris):
        return _kept(data, "lora_type", "lora_rank", "lora_alpha", "lora_dropout")
    if recipe.adapter != "lora":
        raise Unsupported(f"memfit writes no {recipe.adapter} adapters for SimpleTuner", hint="--adapter lora")
    rank, alpha = recipe.lora_rank, recipe.lora_alpha
    said = {"lora_alpha": alpha} if alpha != rank or data.get("lora_alpha") is not None else {}
    return {"lora_type": "standard", **_SIMPLETUNER.write(recipe, "lora_rank", "lora_dropout"), **said}


def start_simpletuner(plan: Plan, file: Path) -> str:
    """Return the command that trains by a file, from the folder to which its other paths are relative."""
    if file.suffix != ".json":  # which it looks for in its own folders alone
        return f"simpletuner train env=memfit, with {file} copied to config/memfit/config.toml"
    several = f" num_processes={plan.recipe.num_gpus}" if plan.recipe.num_gpus > 1 else ""
    return f"simpletuner train {shlex.quote(f'env={file}')}{several}"


def moved(data: Mapping[str, Any], path: Path) -> dict[KeyPath, str]:
    """Return the keys of files that are found beside the user's file alone, with where they lie from this folder."""
    found: dict[KeyPath, str] = {}
    for key, value in data.items():
        if {*_plain({key: value})} & {"data_backend_config", "lycoris_config"} and isinstance(value, str):
            file = _beside(path, value)
            if file and file != Path(value):
                found[key,] = os.path.relpath(file)
    return found


_TEMPLATE = 40  # tokens that a template of a chat puts around a caption, at most


def _sets(keys: Keys, path: Path) -> list[Mapping[str, Any]]:
    """Return the datasets of images that the file names; none where their file is not there."""
    file = _beside(path, keys.text("data_backend_config") or "")
    listed = parse(file) if file else None
    sets = [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    return [row for row in sets if row.get("dataset_type", "image") == "image"]


def _texts(keys: Keys, path: Path) -> dict[str, Any]:
    """Return the tokens of a text, where all have one caption: at most one for each of its bytes."""
    prompts = [row.get("instance_prompt") for row in _sets(keys, path)
               if row.get("caption_strategy") == "instanceprompt"]  # fmt: skip
    known = prompts and len(prompts) == len(_sets(keys, path)) and all(isinstance(prompt, str) for prompt in prompts)
    return {"sequence_length": max(len(str(prompt).encode()) for prompt in prompts) + _TEMPLATE} if known else {}


def _sides(keys: Keys, path: Path) -> tuple[int, str]:
    """Return the side of the largest image that the datasets have, 0 where no file says, and what is assumed."""
    named = keys.text("data_backend_config")
    usual = {"resolution": keys.take("resolution"), "resolution_type": keys.take("resolution_type")}
    sets = _sets(keys, path)
    found = [_side({**usual, **row}) for row in sets]
    if not found and usual["resolution"] is not None:
        found = [_side(usual)]
    there = "has no datasets of images" if named and _beside(path, named) else "is not found from this folder"
    lost = f"{named} {there}: " if named and not sets else ""
    side = max(found, default=0)
    size = f"square images of {side} x {side}" if side else "images of the size that the model was trained for"
    return side, f"{lost}{size} are counted"


def _side(row: Mapping[str, Any]) -> int:
    """Return the side in pixels of a dataset's images, a multiple of 64; areas of a million pixels are 1024 x 1024."""
    size = row.get("resolution") or 0
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= 1 << 14:
        raise BadInput(f"`resolution` must be a size of images, not {short(size)}", hint="for example 1024")
    if row.get("resolution_type") == "area" or 0 < size < 8:  # in millions of pixels
        size = math.sqrt(size * 1e6)
    return round(size / 64) * 64


# ---- kohya's sd-scripts

KOHYA = "kohya"
_KOHYA_MARKS = {"network_module", "train_data_dir", "network_dim", "network_train_unet_only"}
_KOHYA_OPTIMIZERS = {
    "adamw": "adamw-foreach", "adamw8bit": "adamw-8bit", "pagedadamw8bit": "paged-adamw-8bit",
    "pagedadamw32bit": "paged-adamw-32bit", "lion": "lion", "lion8bit": "lion-8bit", "adafactor": "adafactor",
    "sgd": "sgd",
}  # fmt: skip
_KOHYA = KeyTable(
    Key("micro_batch", "train_batch_size", 1),
    Key("accumulation", "gradient_accumulation_steps", 1),
    Key("checkpointing", "gradient_checkpointing", False, values={"full": True, "none": False}),
    Key("lora_rank", "network_dim", 4),
    Key("lora_dropout", "network_dropout", 0.0),
)
_KOHYA_HARMLESS = words("""
    output_* save_* logging_* log_* train_data_dir reg_data_dir in_json caption_* shuffle_caption keep_tokens* seed
    learning_rate unet_lr lr_* max_train_* max_data_loader_n_workers persistent_data_loader_workers min_snr_gamma
    noise_offset* sample_* enable_bucket min_bucket_reso max_bucket_reso bucket_* color_aug flip_aug random_crop
    cache_latents_to_disk cache_text_encoder_outputs_to_disk vae_batch_size prior_loss_weight
    max_grad_norm max_token_length clip_skip huggingface_* wandb_* dataset_config dataset_repeats sd_models* v2
    v_parameterization zero_terminal_snr scale_v_pred_loss* multires_noise_* adaptive_noise_scale no_half_vae
    network_alpha resume training_comment metadata_* lowram text_encoder_lr loss_type huber_* timestep_sampling
    discrete_flow_shift model_prediction_type guidance_scale weighting_scheme t5xxl clip_l clip_g ae
    console_log_* debug_dataset
""")


def is_kohya(data: dict[str, Any]) -> bool:
    """Return whether a file is a --config_file of kohya's sd-scripts."""
    return len(_sections(data).keys() & _KOHYA_MARKS) > 1


def _sections(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of all sections, whose names say nothing."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {str(key): value}
    return flat


def kohya(data: dict[str, Any], path: Path) -> Adopted:
    """Return the content of a --config_file of kohya's train_network.py and its like. Raises BadInput."""
    keys = Keys(_sections(data), str(path))
    adapted = keys.take("network_module") is not None
    if adapted and not keys.flag("full_bf16", "full_fp16"):
        keys.inexpressible.append("network_module")  # its adapters are fp32, which diffusers' are not beside bf16
    keys.not_expressed("network_args")
    if not keys.flag("network_train_unet_only") and not keys.flag("cache_text_encoder_outputs"):
        keys.inexpressible.append("network_train_unet_only")  # without which the text encoders are trained, too
    changes = {
        **_method(keys, "no", adapted, whole="bf16-mixed"), **_KOHYA.read(keys, *_KOHYA),
        "optimizer": _optimizer(keys, "optimizer_type", _KOHYA_OPTIMIZERS, "adamw"),
    }  # fmt: skip
    changes["lora_alpha"] = changes["lora_rank"]
    if not keys.flag("cache_latents") and not keys.flag("cache_latents_to_disk"):
        keys.inexpressible.append("cache_latents")  # the VAE stays on the card
    if not any([keys.flag("sdpa"), keys.flag("xformers"), keys.flag("mem_eff_attn")]):
        keys.inexpressible.append("sdpa")
    sizes = str(keys.take("resolution", default="512")).strip("[]()").replace("x", ",").split(",")
    side = max((int(n) for n in sizes if n.strip().isdigit()), default=0)
    model = keys.text("pretrained_model_name_or_path")
    if model and model.endswith((".safetensors", ".ckpt")):  # one file of weights, which does not say of what
        model = None
    return _adopted(KOHYA, keys, _KOHYA_HARMLESS, changes, side, model, ())


def kohya_settings(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's settings in the sections of the user's file, whose content is `data`. Raises Unsupported."""
    recipe, adapted = plan.recipe, _sections(data).get("network_module") is not None
    _check(recipe, "sd-scripts")
    method = "lora" if adapted else "full"
    if recipe.method != method or recipe.adapter != "lora" or recipe.checkpoint_interval > 1 or recipe.keep_gradients:
        hint = f"--method {method} --adapter lora --checkpoint-interval 1 --no-keep-gradients"
        raise Unsupported("a script of sd-scripts trains in one way, which this plan leaves", hint=hint)
    places: dict[str, tuple[str, ...]] = {}
    for key, value in data.items():
        places |= {inner: (key, inner) for inner in value} if isinstance(value, Mapping) else {key: (key,)}
    optimizer = _named(recipe, "sd-scripts", _KOHYA_OPTIMIZERS, "adamw")
    fields = [field for field in _KOHYA if adapted or not field.startswith("lora_")]
    written = {**_KOHYA.write(recipe, *fields), "optimizer_type": optimizer}
    return _placed(written | {"mixed_precision": _mixed(recipe, whole="bf16-mixed")}, places)


def start_kohya(plan: Plan, file: Path) -> str:
    """Return how a file is trained by; which script of sd-scripts does depends on the model."""
    return f"your script of sd-scripts, with --config_file {shlex.quote(str(file))}"
