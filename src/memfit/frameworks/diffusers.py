"""A train.py for text-to-image pipelines: the loop of diffusers' example scripts, with accelerate and PEFT.

It does what `virtual/jobs/diffusion.py` traces: frozen parts on the card encode each batch, or all samples before the
training, and the denoiser is trained whole or by adapters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import memfit.frameworks.script as script
from memfit.data.task_samples import COLUMNS
from memfit.errors import Unsupported
from memfit.frameworks import process_layout
from memfit.frameworks.script_data import READERS, ROWS, ScriptKind, Setting, data_text, layouts
from memfit.frameworks.script_media import read_folder
from memfit.frameworks.text import WIDTH, literal, savings
from memfit.frameworks.training_keys import whole
from memfit.models.hub import resolve_config
from memfit.nouns.plan import Plan
from memfit.tables.optimizers import optimizer
from memfit.tables.pipelines import ATTENTION, Pipeline, pipeline
from memfit.tables.tasks import TASKS

NAME, VERSIONS = "diffusers", "diffusers 0.42, accelerate 1.15, peft 0.21, torch 2.13"
_MIXED = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}  # accelerate's name of what is computed


def export(plan: Plan, how: process_layout.Launch | None = None) -> dict[str, str]:
    """Return train.py and requirements.txt. Raises Unsupported."""
    row = TASKS[plan.job.task]
    if row.sample != "noise":
        raise Unsupported(f"{NAME} does not run {row.title}", hint=f"--target {row.target}")
    kind = written(plan.job.architecture.name)
    _check(plan)
    how, kept = how or process_layout.launch_of(plan.recipe), CAPTIONS
    return {
        "train.py": train(plan, how, kind),
        "requirements.txt": script.requirements(plan.recipe, NAME, how.backend, (NAME, *kept.packages)),
    }


def written(name: str) -> Pipeline:
    """Return the row of a pipeline that has a script. Raises Unsupported."""
    kind = pipeline(resolve_config(name))
    if kind.prepared:
        hint = "leave --out out; memfit trace train.py runs one of diffusers' own"
        raise Unsupported(f"no script is written for {kind.key}", hint=hint)
    return kind


def _check(plan: Plan) -> None:
    """Refuse what the loop does not do. Raises Unsupported."""
    r, training, row = plan.recipe, plan.job.training, optimizer(plan.recipe.optimizer)
    refused = (
        (r.num_gpus > 1, "runs on one card", "--gpu with one card; memfit trace train.py runs your own script"),
        (r.method == "qlora", "loads the base of adapters whole", "--method lora"),
        (r.method != "full" and r.adapter != "lora", "trains LoRA alone", "--adapter lora"),
        (r.compile, "does not compile the model", "--no-compile"),
        (r.attention != "sdpa", "attends by PyTorch's SDPA", "--attention sdpa"),
        (r.checkpointing not in ("none", "full"), "keeps all activations or the inputs of blocks",
         "--checkpointing full"),
        (r.keep_gradients, "frees gradients after each step", "--no-keep-gradients"),
        (r.checkpoint_interval > 1, "checkpoints every block", "--checkpoint-interval 1"),
        (not row.loop or row.matrices_only, f"cannot train all weights by {row.title}", "--optimizer adamw"),
        (bool(training.eval_data or training.eval_share), "does not evaluate", "leave out --eval-data"),
    )  # fmt: skip
    for wrong, what, hint in refused:
        if wrong:
            raise Unsupported(f"the loop of diffusers' scripts {what}", hint=hint)


def train(plan: Plan, how: process_layout.Launch, kind: Pipeline) -> str:
    """Return the text of train.py."""
    saved, recipe = savings(plan), plan.recipe
    named = ATTENTION if recipe.lora_targets == ("attention",) else recipe.lora_targets
    targets = kind.targets if recipe.lora_targets == ("all-linear",) else named
    adapted = replace(plan, recipe=recipe.but(lora_targets=targets))
    lines = script.opening(adapted, how, NAME, VERSIONS, CAPTIONS, _imports(plan, kind), saved)
    at = lines.index("def arguments(words: list[str] | None = None) -> argparse.Namespace:") - 2
    lines[at:at] = _constants(plan, kind)
    lines = [line for line in lines if "--eval-data" not in line]  # which it does not do
    parts = (_frozen(plan, kind), _batches(plan), _denoiser(plan, kind, saved), _loop(plan, kind))
    read = data_text(CAPTIONS, plan.job.training)
    return "\n".join([*lines, "".join((*parts, CAPTIONS.encode, read, script.CALL))])


def _half(plan: Plan) -> str:
    """Return the dtype of frozen parts and of what is computed."""
    return process_layout.numbers(plan.recipe, "plain").compute


def _constants(plan: Plan, kind: Pipeline) -> list[str]:
    half, seed = _half(plan), plan.job.training.seed
    return [
        f"TOKENS = {literal(list(kind.texts))}  # of the text encoders",
        f"HALF = torch.{half}  # of the frozen parts, and of what is computed",
        f"SEED = {seed}",
    ]


def _imports(plan: Plan, kind: Pipeline) -> dict[str, Iterable[str]]:
    recipe, adapters = plan.recipe, plan.recipe.method != "full"
    module, _, _ = optimizer(recipe.optimizer).loop.rpartition(".")
    scheduler = "DDPMScheduler" if kind.denoiser == "unet" else "FlowMatchEulerDiscreteScheduler"
    parts = {kind.key} if adapters or kind.key == "FluxPipeline" else set()
    found: dict[str, Iterable[str]] = {
        "math": (), "shutil": (), "torch": (), "numpy": (), module: (),
        "accelerate": ("Accelerator",), "accelerate.utils": ("set_seed",),
        "diffusers": {"AutoencoderKL", kind.trained, scheduler, *parts}, "diffusers.optimization": ("get_scheduler",),
        "transformers": {*kind.encoders, "AutoTokenizer", "PreTrainedModel"},
    }  # fmt: skip
    if module.startswith("torch."):
        del found[module]
    if adapters:
        found["peft"] = ("LoraConfig", "get_peft_model_state_dict")
        found |= {"diffusers.utils": ("convert_state_dict_to_diffusers",)} if kind.denoiser == "unet" else {}
    return found


# ---- frozen parts

_LOAD = '''\
def load_frozen(model: str) -> tuple[AutoencoderKL, list[PreTrainedModel]]:
    """Return the VAE and the text encoders, which are not trained."""
    vae = AutoencoderKL.from_pretrained(model, subfolder="vae", torch_dtype={vae})
    texts = [
{texts}
    ]
    for part in (vae, *texts):
        part.requires_grad_(False).eval()
    return vae, texts


def load_tokenizers(model: str) -> list:
    """Return the tokenizer of each text encoder."""
    names = {tokenizers}
    return [AutoTokenizer.from_pretrained(model, subfolder=name) for name in names]


@torch.no_grad()
def latents_of(vae: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    """Return the latents of images."""
    found = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.sample()
    return ((found - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor).to(HALF)


@torch.no_grad()
def embed(texts: list[PreTrainedModel], ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the embeddings of captions{pooled}."""
    ids = [row.to(text.device) for text, row in zip(texts, ids, strict=True)]
{embed}


'''
_EMBED = {
    "StableDiffusionPipeline": "    return [texts[0](ids[0], return_dict=False)[0]]",
    "StableDiffusionXLPipeline": """\
    words = {"output_hidden_states": True, "return_dict": False}
    found = [text(row, **words) for text, row in zip(texts, ids, strict=True)]
    return [torch.cat([out[-1][-2].to(ids[0].device) for out in found], dim=-1), found[-1][0]]""",
    "StableDiffusion3Pipeline": """\
    words = {"output_hidden_states": True, "return_dict": False}
    found = [text(row, **words) for text, row in zip(texts[:2], ids[:2], strict=True)]
    long = texts[2](ids[2], return_dict=False)[0].to(ids[0].device)
    states = torch.cat([out[-1][-2] for out in found], dim=-1)
    filled = torch.nn.functional.pad(states, (0, long.shape[-1] - states.shape[-1]))
    return [torch.cat([filled, long], dim=-2), torch.cat([out[0] for out in found], dim=-1)]""",
    "FluxPipeline": """\
    pooled = texts[0](ids[0], return_dict=False)[1]
    return [texts[1](ids[1], return_dict=False)[0].to(pooled.device), pooled]""",
}


def _frozen(plan: Plan, kind: Pipeline) -> str:
    number = range(1, len(kind.encoders) + 1)
    suffix = ["" if i == 1 else f"_{i}" for i in number]
    texts = [
        f'        {name}.from_pretrained(model, subfolder="text_encoder{end}", dtype=HALF),'
        for name, end in zip(kind.encoders, suffix, strict=True)
    ]
    return _LOAD.format(
        vae="torch.float32" if kind.vae_fp32 else "HALF", texts="\n".join(texts),
        tokenizers=literal([f"tokenizer{end}" for end in suffix]), embed=_EMBED[kind.key],
        pooled="" if len(kind.encoders) == 1 else ", and the pooled ones",
    )  # fmt: skip


# ---- batches

_CACHED = '''\
def place(part: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a frozen part on the device, or on the CPU where the card has no room for it."""
    size = sum(weight.numel() * weight.element_size() for weight in part.parameters())
    roomy = device.type == "cpu" or size < 0.8 * torch.cuda.mem_get_info()[0]
    return part.to(device if roomy else "cpu")


def cached(samples: Dataset, model: str, device: torch.device) -> list[dict]:
    """Return latents and embeddings of all samples, in host memory; what makes them leaves the card again."""
    vae, texts = load_frozen(model)
    vae, texts = place(vae, device), [place(text, device) for text in texts]
    found = []
    for sample in samples:
        states = embed(texts, [ids[None] for ids in sample["ids"]])
        latents = latents_of(vae, sample["pixels"][None])
        found.append({"latents": latents[0].cpu(), "states": [state[0].cpu() for state in states]})
    del vae, texts
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


'''


def _batches(plan: Plan) -> str:
    return _CACHED if plan.job.shape.cached else ""


# ---- the denoiser

_TRAINED = '''\
def load_denoiser(model: str, device: torch.device) -> {trained}:
    """Return the model that is trained."""
    denoiser = {trained}.from_pretrained(model, subfolder="{name}", torch_dtype={dtype})
    denoiser.to(device)
{adapters}{checkpointing}    return denoiser.train()


'''
_ADAPTERS = """\
    denoiser.requires_grad_(False)
    denoiser.add_adapter(ADAPTER)
"""
_WIDE = """\
    for weight in denoiser.parameters():
        if weight.requires_grad:  # fp16's loss scaler takes gradients in fp32 alone
            weight.data = weight.data.float()
"""
_NOISED = {
    "unet": '''\
def noised(latents: torch.Tensor, scheduler: DDPMScheduler) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return noisy latents, their times, and what is to be predicted."""
    noise = torch.randn_like(latents)
    times = torch.randint(0, scheduler.config.num_train_timesteps, (len(latents),), device=latents.device)
    noisy = scheduler.add_noise(latents, noise, times)
    if scheduler.config.prediction_type == "v_prediction":
        return noisy, times, scheduler.get_velocity(latents, noise, times)
    return noisy, times, noise


''',
    "transformer": '''\
def noised(
    latents: torch.Tensor, scheduler: FlowMatchEulerDiscreteScheduler
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return latents part of the way to noise, how far they are, and the direction, which is to be predicted."""
    noise = torch.randn_like(latents)
    count = scheduler.config.num_train_timesteps
    index = (torch.sigmoid(torch.randn(len(latents))) * count).long().clamp(max=count - 1)
    times, sigmas = (each[index].to(latents.device) for each in (scheduler.timesteps, scheduler.sigmas))
    share = sigmas.to(latents.dtype).view(-1, 1, 1, 1)
    return (1 - share) * latents + share * noise, times, noise - latents


''',
}
_PREDICT = {
    "StableDiffusionPipeline": "    return denoiser(noisy, times, states[0], return_dict=False)[0]",
    "StableDiffusionXLPipeline": """\
    wide, tall = RESOLUTION
    sizes = torch.tensor([[tall, wide, 0, 0, tall, wide]] * len(noisy), dtype=noisy.dtype, device=noisy.device)
    added = {"time_ids": sizes, "text_embeds": states[1]}
    return denoiser(noisy, times, states[0], added_cond_kwargs=added, return_dict=False)[0]""",
    "StableDiffusion3Pipeline": """\
    words = {"encoder_hidden_states": states[0], "pooled_projections": states[1], "return_dict": False}
    return denoiser(hidden_states=noisy, timestep=times, **words)[0]""",
    "FluxPipeline": """\
    count, channels, tall, wide = noisy.shape
    guided = None
    if denoiser.config.guidance_embeds:
        guided = torch.full((count,), GUIDANCE, device=noisy.device)
    found = denoiser(
        hidden_states=FluxPipeline._pack_latents(noisy, count, channels, tall, wide),
        timestep=times / 1000,
        guidance=guided,
        pooled_projections=states[1],
        encoder_hidden_states=states[0],
        txt_ids=torch.zeros(states[0].shape[1], 3, dtype=noisy.dtype, device=noisy.device),
        img_ids=FluxPipeline._prepare_latent_image_ids(count, tall // 2, wide // 2, noisy.device, noisy.dtype),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(found, height=tall * 8, width=wide * 8, vae_scale_factor=8)""",
}
_PREDICTED = '''\
def predicted(
    denoiser: {trained}, noisy: torch.Tensor, times: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return what the denoiser predicts."""
{body}


'''


def _denoiser(plan: Plan, kind: Pipeline, saved: dict[str, str]) -> str:
    recipe = plan.recipe
    weights = process_layout.numbers(recipe, "plain").weights
    adapters = _ADAPTERS + (_WIDE if _half(plan) == "float16" else "")
    checkpointing = script.with_comment(
        "denoiser.enable_gradient_checkpointing()", saved.get("checkpointing", ""), "    "
    )
    body = _PREDICT[kind.key].replace("denoiser.config", "inner(denoiser).config").replace("GUIDANCE", "3.5")
    return (
        _TRAINED.format(
            trained=kind.trained, name=kind.denoiser, adapters=adapters if recipe.method != "full" else "",
            dtype=f"torch.{weights}" if recipe.method == "full" else "HALF",
            checkpointing="\n".join([*checkpointing, ""]) if recipe.checkpointing != "none" else "",
        )
        + _NOISED[kind.denoiser] + _PREDICTED.format(trained=kind.trained, body=body)
    )  # fmt: skip


# ---- the loop

_LOOP = '''\
def main() -> None:
    args = arguments()
    mixed = {mixed}
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=mixed, gradient_accumulation_steps=ACCUMULATION)
    set_seed(SEED)
    device = accelerator.device
    samples = encode(load(args.data), load_tokenizers(args.model))
{frozen}
    denoiser = load_denoiser(args.model, device)
    trained = [weight for weight in denoiser.parameters() if weight.requires_grad]
{optimizer}
    loader = torch.utils.data.DataLoader(samples, batch_size=MICRO_BATCH, shuffle=True)
    each = -(-len(loader) // ACCUMULATION)  # optimizer steps of an epoch
    steps = args.max_steps if args.max_steps > 0 else math.ceil(each * args.epochs)
    schedule = get_scheduler({schedule}, optimizer, {warmup}, steps)
    noise = {scheduler}.from_pretrained(args.model, subfolder="scheduler")
    denoiser, optimizer, loader, schedule = accelerator.prepare(denoiser, optimizer, loader, schedule)
    step = resume(args, denoiser, optimizer, schedule)
    while step < steps:
        for batch in loader:
            with accelerator.accumulate(denoiser):
{encoded}
                noisy, times, target = noised(latents, noise)
                found = predicted(denoiser, noisy, times, states)
                loss = torch.nn.functional.mse_loss(found.float(), target.float())
                accelerator.backward(loss)
{clip}\
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % 10 == 0 or step == steps:
                print({{"step": step, "loss": round(loss.item(), 4), "learning_rate": schedule.get_last_lr()[0]}})
            if step % every(args, steps) == 0 or step == steps:
                save_checkpoint(args, step, denoiser, optimizer, schedule)
            if step == steps:
                break
    save(inner(denoiser), args.output)


def every(args: argparse.Namespace, steps: int) -> int:
    """Return the steps between checkpoints."""
    return max(math.ceil(args.save_steps * steps) if args.save_steps < 1 else int(args.save_steps), 1)


def inner(denoiser: {trained}) -> {trained}:
    """Return the denoiser without what accelerate put around it."""
    return getattr(denoiser, "module", denoiser)


def save(denoiser: {trained}, output: str) -> None:
    """Save what was trained, as diffusers loads it."""
{save}


def save_checkpoint(
    args: argparse.Namespace, step: int, denoiser: {trained}, optimizer: object, schedule: object
) -> None:
    """Save what is needed to resume, whole or not at all, and keep the last checkpoints."""
    folder, new = Path(args.output) / f"checkpoint-{{step}}", Path(args.output) / "checkpoint-new"
    weights = {{name: weight for name, weight in inner(denoiser).named_parameters() if weight.requires_grad}}
    state = {{"step": step, "weights": weights, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}}
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    torch.save(state, new / "state.pt")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    for old in checkpoints(args.output)[:-{kept}]:
        shutil.rmtree(old)


def checkpoints(output: str) -> list[Path]:
    """Return the checkpoints, the oldest first."""
    found = [state.parent for state in Path(output).glob("checkpoint-*/state.pt")]
    return sorted((path for path in found if path.name != "checkpoint-new"), key=lambda path: int(path.name[11:]))


def resume(args: argparse.Namespace, denoiser: {trained}, optimizer: object, schedule: object) -> int:
    """Load the checkpoint that --resume names, or the last one, and return its step; without --resume 0."""
    named = next((Path(path) for path in args.resume if path is not True), None)
    last = next(iter(checkpoints(args.output)[-1:]), None) if True in args.resume else None
    folder = last or named
    if folder is None:
        if args.resume:
            print(f"{{args.output}} holds no checkpoint: training starts at the beginning")
        return 0
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    inner(denoiser).load_state_dict(state["weights"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return state["step"]


'''
_CLIP = """\
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, {norm})
"""
_ON_CARD = """\
    vae, texts = load_frozen(args.model)
    for part in (vae, *texts):
        part.to(device)
"""
_EACH = """\
                latents, states = latents_of(vae, batch["pixels"]), embed(texts, batch["ids"])"""
_GIVEN = """\
                latents, states = batch["latents"], batch["states"]"""


def _loop(plan: Plan, kind: Pipeline) -> str:
    training, cached, half = plan.job.training, plan.job.shape.cached, _half(plan)
    mixed = literal(_MIXED[half]) if half != "float16" else '"no" if args.cpu else "fp16"'
    clip = _CLIP.format(norm=literal(training.max_grad_norm)) if training.max_grad_norm else ""
    share = 0 < training.warmup < 1
    warmup = f"int({training.warmup} * steps)" if share else str(int(max(training.warmup, 0)))
    return _LOOP.format(
        mixed=mixed, trained=kind.trained, optimizer=_optimizer(plan), clip=clip, warmup=warmup,
        schedule=literal(training.lr_scheduler or "constant"),
        scheduler="DDPMScheduler" if kind.denoiser == "unet" else "FlowMatchEulerDiscreteScheduler",
        frozen="    samples = cached(samples, args.model, device)" if cached else _ON_CARD.rstrip("\n"),
        encoded=_GIVEN if cached else _EACH, save=_save(plan, kind), kept=training.save_total_limit or 2,
    )  # fmt: skip


def _optimizer(plan: Plan) -> str:
    training, row = plan.job.training, optimizer(plan.recipe.optimizer)
    words = {"lr": "args.learning_rate", "weight_decay": literal(whole(training.weight_decay))}
    words |= {name: literal(value) for name, value in row.arguments.items()}
    given = ", ".join(f"{name}={value}" for name, value in words.items())
    line = f"    optimizer = {row.loop}(trained, {given})"
    return line if len(line) <= WIDTH else f"    optimizer = {row.loop}(\n        trained, {given}\n    )"


def _save(plan: Plan, kind: Pipeline) -> str:
    if plan.recipe.method == "full":
        return f'    denoiser.save_pretrained(Path(output) / "{kind.denoiser}")'
    weights = "get_peft_model_state_dict(denoiser)"
    if kind.denoiser == "unet":
        weights = f"convert_state_dict_to_diffusers({weights})"
    return f"    weights = {weights}\n    {kind.key}.save_lora_weights(output, {kind.denoiser}_lora_layers=weights)"


# ---- images and their captions


def _resolution(plan: Plan) -> list[Setting]:
    return [("RESOLUTION", str(plan.job.shape.image), "width and height; images are scaled and cut to it")]


CAPTIONS = ScriptKind(
    holds="hold an image\n(or its path) and its caption; or a folder of images with a metadata.jsonl",
    data=layouts(*COLUMNS["noise"])
    + 'FILES = ("image",)\n' + READERS + ROWS + read_folder("imagefolder"),
    imports={"PIL": ("ImageOps",), "datasets": ("Image",)},
    encode='''\
def encode(samples: Dataset, tokenizers: list) -> Dataset:
    """Return pixels from -1 to 1, and the token ids of each text encoder, which are made when they are used."""
    image, text = samples.column_names

    def encoded(rows: dict) -> dict:
        captions = [str(value) for value in rows[text]]
        words = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        ids = [
            tokenizer(captions, max_length=tokens, **words).input_ids
            for tokenizer, tokens in zip(tokenizers, TOKENS, strict=True)
        ]
        return {"pixels": [pixels(one) for one in rows[image]], "ids": list(zip(*ids, strict=True))}

    return samples.cast_column(image, Image()).with_transform(encoded)


def pixels(picture: object) -> torch.Tensor:
    """Return an image as the VAE takes it."""
    cut = ImageOps.fit(picture.convert("RGB"), RESOLUTION)
    return torch.from_numpy(numpy.asarray(cut, dtype=numpy.float32) / 127.5 - 1).permute(2, 0, 1)


''',
    packages=("pillow",),
    sizes=_resolution,
)  # fmt: skip
