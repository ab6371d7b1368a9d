"""Trainings of other tasks than causal language models: each a function that builds one and runs three steps.

The models have their published shapes and random weights (some fewer layers), the data are made in place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.virtual.jobs.tasks import WORDS
from memfit.virtual.jobs.tasks import words as tokenizer

STEPS = 3


class _Same(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, one: dict[str, Any], count: int) -> None:
        self._one, self._count = one, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _: int) -> dict[str, Any]:
        return dict(self._one)


def built(make: Callable[[], Any]) -> Any:
    """Return a model built on the card."""
    with torch.device("cuda"):
        return make()


def trained(model: Any, one: dict[str, Any], batch: int, **words: Any) -> None:
    """Train with transformers' Trainer on copies of one sample, then evaluate."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, max_steps=STEPS,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
            prediction_loss_only=True, **{"bf16": True, **words},
        )  # fmt: skip
        data = _Same(one, batch * (STEPS + 2))
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=_Same(one, 2 * batch))
        trainer.train()
        trainer.evaluate()


def text(count: int) -> str:
    """Return a text of so many tokens."""
    return " ".join(f"w{i % WORDS}" for i in range(count))


def numbers(*shape: int) -> torch.Tensor:
    """Return token ids, the same every time."""
    count = 1
    for n in shape:
        count *= n
    return (torch.arange(count) % 900 + 3).view(shape)


# --- images, speech, encoders ---


def vit(**words: Any) -> None:
    """Classify images with ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    one = {"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(1)}
    trained(built(lambda: ViTForImageClassification(ViTConfig(num_labels=100))), one, 64, **words)


def resnet(**words: Any) -> None:
    """Classify images with ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    one = {"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(1)}
    trained(built(lambda: ResNetForImageClassification(ResNetConfig(num_labels=100))), one, 64, **words)


def convnext() -> None:
    """Classify images with ConvNeXt-T."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    one = {"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(1)}
    trained(built(lambda: ConvNextForImageClassification(ConvNextConfig(num_labels=100))), one, 32)


def swin() -> None:
    """Classify images with Swin-T."""
    from transformers import SwinConfig, SwinForImageClassification

    one = {"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(1)}
    trained(built(lambda: SwinForImageClassification(SwinConfig(num_labels=100))), one, 32)


def segformer() -> None:
    """Segment images with SegFormer-B0."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    one = {"pixel_values": torch.zeros(3, 512, 512), "labels": torch.zeros(512, 512, dtype=torch.long)}
    trained(built(lambda: SegformerForSemanticSegmentation(SegformerConfig(num_labels=20))), one, 8)


def whisper(**words: Any) -> None:
    """Transcribe 30 seconds with Whisper small."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072,
    )  # fmt: skip
    one = {"input_features": torch.zeros(80, 3000), "labels": numbers(128)}
    trained(built(lambda: WhisperForConditionalGeneration(config)), one, 8, **words)


def wav2vec2() -> None:
    """Transcribe ten seconds with wav2vec2-base and CTC."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(mask_time_prob=0.0, ctc_loss_reduction="mean", pad_token_id=0)
    one = {"input_values": torch.zeros(160000), "labels": numbers(60) % 30 + 1}
    trained(built(lambda: Wav2Vec2ForCTC(config)), one, 8, ddp_find_unused_parameters=False)


def bert(**words: Any) -> None:
    """Classify texts with BERT-base."""
    from transformers import BertConfig, BertForSequenceClassification

    one = {"input_ids": numbers(256), "attention_mask": torch.ones(256, dtype=torch.long), "labels": torch.tensor(1)}
    trained(built(lambda: BertForSequenceClassification(BertConfig())), one, 32, **words)


def roberta() -> None:
    """Fill masks with RoBERTa-base."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    one = {"input_ids": numbers(512), "attention_mask": torch.ones(512, dtype=torch.long), "labels": numbers(512)}
    trained(built(lambda: RobertaForMaskedLM(config)), one, 8)


def modernbert() -> None:
    """Fill masks with ModernBERT-base."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    one = {"input_ids": numbers(1024), "attention_mask": torch.ones(1024, dtype=torch.long), "labels": numbers(1024)}
    trained(built(lambda: ModernBertForMaskedLM(ModernBertConfig())), one, 8)


def t5(**words: Any) -> None:
    """Translate with FLAN-T5 base."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    one = {"input_ids": numbers(512), "attention_mask": torch.ones(512, dtype=torch.long), "labels": numbers(128)}
    trained(built(lambda: T5ForConditionalGeneration(config)), one, 8, **words)


def bart() -> None:
    """Summarise with BART-large."""
    from transformers import BartConfig, BartForConditionalGeneration

    one = {"input_ids": numbers(512), "attention_mask": torch.ones(512, dtype=torch.long), "labels": numbers(128)}
    trained(built(lambda: BartForConditionalGeneration(BartConfig())), one, 4)


def qwen_vl() -> None:
    """Train adapters on one image and a text with Qwen2.5-VL's shapes, eight layers of its decoder."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24], "rope_type": "default"},
        },
        vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048,
                       "num_heads": 16, "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112},
        image_token_id=151655, vision_start_token_id=151652, vision_end_token_id=151653, video_token_id=151656,
    )  # fmt: skip
    model = built(lambda: Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16))
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    grid, ids = torch.tensor([[1, 36, 52]]), numbers(2, 36 * 52 // 4 + 200)
    ids[:, 10], ids[:, 11 : 11 + 36 * 52 // 4] = 151652, 151655
    pixels = torch.zeros(2 * 36 * 52, 3 * 2 * 14 * 14)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels,
             "image_grid_thw": grid.repeat(2, 1), "labels": ids,
             "mm_token_type_ids": (ids == 151655).long()}  # fmt: skip
    loop(model, lambda: model(**{k: v.cuda() for k, v in batch.items()}).loss)


def loop(model: Any, loss: Callable[[], Any], optimizer: Any = None) -> None:
    """Train with a plain loop under autocast."""
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(weights)
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            found = loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()


# --- preferences and rewards ---


def causal(layers: int = 24) -> Any:
    """Return a language model of Qwen2.5-0.5B's shapes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768,
    )  # fmt: skip
    return built(lambda: Qwen2ForCausalLM(config).to(torch.bfloat16))


def preferred(name: str, rows: dict[str, Any], batch: int, lora: bool = False, **words: Any) -> None:
    """Train with a trainer of TRL. name: of the trainer, without "Trainer"."""
    import datasets
    import trl
    from peft import LoraConfig

    with tempfile.TemporaryDirectory() as folder:
        common = {
            "per_device_train_batch_size": batch, "max_steps": STEPS, "save_strategy": "no", "logging_strategy": "no",
            "report_to": [], "disable_tqdm": True, "bf16": True, "gradient_checkpointing": False, **words,
        }  # fmt: skip
        model = causal()
        if name == "Reward":
            from transformers import Qwen2ForSequenceClassification

            config = model.config
            config.num_labels, config.pad_token_id = 1, 1
            model = built(lambda: Qwen2ForSequenceClassification(config).to(torch.bfloat16))
        data = datasets.Dataset.from_list([rows] * (batch * (STEPS + 2)))
        given: dict[str, Any] = {"peft_config": LoraConfig(r=16, target_modules=["q_proj", "v_proj"])} if lora else {}
        if name == "DPO" and not (lora or words.get("precompute_ref_log_probs")):
            given["ref_model"] = causal()
        if name == "GRPO":
            given["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
        arguments = getattr(trl, f"{name}Config")(folder, **common)
        getattr(trl, f"{name}Trainer")(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), **given
        ).train()


PAIR = {"prompt": text(256), "chosen": text(256), "rejected": text(256)}


def dpo(**words: Any) -> None:
    """Prefer one of two answers of 256 tokens, after a prompt of 256."""
    preferred("DPO", PAIR, 4, max_length=512, **words)


def reward() -> None:
    """Score the better of two texts of 500 tokens higher."""
    preferred("Reward", {"chosen": text(500), "rejected": text(500)}, 4, max_length=512)


def grpo(**words: Any) -> None:
    """Sample eight answers of 64 tokens to a prompt, and learn from their rewards."""
    preferred(
        "GRPO", {"prompt": text(64)}, 8, num_generations=8, max_completion_length=64,
        generation_kwargs={"min_new_tokens": 64}, **words,
    )  # fmt: skip


# --- diffusion ---


def adapted(model: Any, names: Sequence[str]) -> Any:
    """Freeze a model in bf16 and give it trained adapters in fp32, as diffusers' scripts do."""
    from peft import LoraConfig

    model.requires_grad_(False)
    model.to(torch.bfloat16)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian", target_modules=list(names)))
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")


def stable_diffusion(lora: bool, batch: int = 4) -> None:
    """Train Stable Diffusion 1.5's UNet at 512 x 512, its VAE and text encoder resident."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = built(lambda: AutoencoderKL(block_out_channels=[128, 256, 512, 512], layers_per_block=2, **blocks))
    vae.requires_grad_(False).to(torch.bfloat16)
    coder = built(
        lambda: CLIPTextModel(
            CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        )
    )
    coder.requires_grad_(False).to(torch.bfloat16)
    unet = built(lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768))
    if lora:
        adapted(unet, ATTENTION)
    pixels, ids = torch.zeros(batch, 3, 512, 512), numbers(batch, 77)

    def loss() -> Any:
        latents = vae.encode(pixels.to("cuda", torch.bfloat16)).latent_dist.sample() * 0.18
        noise = torch.randn_like(latents)
        states = coder(ids.cuda(), return_dict=False)[0]
        steps = torch.randint(0, 1000, (batch,), device="cuda").long()
        found = unet(latents + noise, steps, states, return_dict=False)[0]
        return torch.nn.functional.mse_loss(found.float(), noise.float())

    loop(unet, loss)


def sdxl(batch: int = 1) -> None:
    """Train adapters of SDXL's UNet at 1024 x 1024 on cached latents and embeddings."""
    from diffusers import UNet2DConditionModel

    unet = built(
        lambda: UNet2DConditionModel(
            sample_size=128, block_out_channels=[320, 640, 1280], cross_attention_dim=2048,
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            transformer_layers_per_block=[1, 2, 10], attention_head_dim=[5, 10, 20], use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        ).to(torch.bfloat16)
    )  # fmt: skip
    adapted(unet, ATTENTION)
    words = {"device": "cuda", "dtype": torch.bfloat16}

    def loss() -> Any:
        latents = torch.zeros(batch, 4, 128, 128, **words)
        noise = torch.randn_like(latents)
        added = {"text_embeds": torch.zeros(batch, 1280, **words), "time_ids": torch.zeros(batch, 6, **words)}
        steps = torch.randint(0, 1000, (batch,), device="cuda").long()
        states = torch.zeros(batch, 77, 2048, **words)
        found = unet(latents + noise, steps, states, added_cond_kwargs=added, return_dict=False)[0]
        return torch.nn.functional.mse_loss(found.float(), noise.float())

    loop(unet, loss)


def autoencoder() -> None:
    """Encode a batch of images of 1024 x 1024 with SDXL's VAE, in fp32 as it asks for, and train its decoder."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = built(lambda: AutoencoderKL(block_out_channels=[128, 256, 512, 512], layers_per_block=2, **blocks))
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)

    def loss() -> Any:
        pixels = torch.zeros(1, 3, 1024, 1024, device="cuda")
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            latents = vae.encode(pixels).latent_dist.sample()
        return torch.nn.functional.mse_loss(vae.decode(latents, return_dict=False)[0].float(), pixels)

    loop(vae, loss)


def sd3(batch: int = 2) -> None:
    """Train adapters of Stable Diffusion 3's transformer at 1024 x 1024, twelve of its layers."""
    from diffusers import SD3Transformer2DModel

    model = built(
        lambda: SD3Transformer2DModel(
            sample_size=128, num_layers=12, attention_head_dim=64, num_attention_heads=24, joint_attention_dim=4096,
            caption_projection_dim=1536, pooled_projection_dim=2048, in_channels=16, out_channels=16,
            pos_embed_max_size=192,
        ).to(torch.bfloat16)
    )  # fmt: skip
    adapted(model, ATTENTION)
    words = {"device": "cuda", "dtype": torch.bfloat16}

    def loss() -> Any:
        latents = torch.zeros(batch, 16, 128, 128, **words)
        found = model(
            hidden_states=latents, timestep=torch.zeros(batch, device="cuda"),
            encoder_hidden_states=torch.zeros(batch, 154, 4096, **words),
            pooled_projections=torch.zeros(batch, 2048, **words), return_dict=False,
        )[0]  # fmt: skip
        return torch.nn.functional.mse_loss(found.float(), latents.float())

    loop(model, loss)


# --- embeddings ---


def embedding() -> None:
    """Train a sentence encoder of MiniLM's shapes with in-batch negatives."""
    import datasets
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=WORDS + 3, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        encoder = Transformer(folder, max_seq_length=128)
        model = SentenceTransformer(modules=[encoder, Pooling(384)], device="cuda")
        arguments = SentenceTransformerTrainingArguments(
            folder, per_device_train_batch_size=128, max_steps=STEPS, save_strategy="no", logging_strategy="no",
            report_to=[], disable_tqdm=True, bf16=True,
        )  # fmt: skip
        data = datasets.Dataset.from_list([{"anchor": text(126), "positive": text(126)}] * (128 * (STEPS + 2)))
        trainer = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
        )
        trainer.train()


TASKS: dict[str, Callable[[], None]] = {
    "vit-b classification": vit,
    "vit-b classification fp32": lambda: vit(bf16=False),
    "vit-b classification compiled": lambda: vit(torch_compile=True),
    "vit-b classification compiled with graphs": lambda: vit(torch_compile=True, torch_compile_mode="reduce-overhead"),
    "resnet-50 classification": resnet,
    "resnet-50 classification fp32": lambda: resnet(bf16=False),
    "resnet-50 classification fp16": lambda: resnet(bf16=False, fp16=True),
    "convnext-t classification": convnext,
    "swin-t classification": swin,
    "segformer-b0 segmentation": segformer,
    "whisper small": whisper,
    "whisper small fp16": lambda: whisper(bf16=False, fp16=True),
    "wav2vec2 ctc": wav2vec2,
    "bert classification": bert,
    "bert classification fp32": lambda: bert(bf16=False),
    "bert classification compiled with graphs": lambda: bert(torch_compile=True, torch_compile_mode="reduce-overhead"),
    "roberta masks": roberta,
    "modernbert masks": modernbert,
    "t5 translation": t5,
    "t5 translation checkpointed": lambda: t5(gradient_checkpointing=True),
    "bart summaries": bart,
    "qwen2.5-vl lora": qwen_vl,
    "dpo": dpo,
    "dpo lora": lambda: dpo(lora=True),
    "dpo precomputed": lambda: dpo(precompute_ref_log_probs=True),
    "reward": reward,
    "grpo": grpo,
    "grpo lora": lambda: grpo(lora=True, beta=0.04),
    "stable diffusion lora": lambda: stable_diffusion(True),
    "stable diffusion full": lambda: stable_diffusion(False, 2),
    "sdxl lora": sdxl,
    "sdxl lora b4": lambda: sdxl(4),
    "vae decoder": autoencoder,
    "sd3 lora": sd3,
    "embedding": embedding,
}
