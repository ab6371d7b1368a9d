"""LoRA with eager attention and checkpointing, merged at the end; a text encoder beside a small network of its own."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, CLIPTextConfig, CLIPTextModel, MixtralConfig

config = MixtralConfig(
    vocab_size=4000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
)  # fmt: skip
base = AutoModelForCausalLM.from_config(config, attn_implementation="eager").cuda()
base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad])
ids = torch.ones(2, 32, dtype=torch.long, device="cuda")
model.train()
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
model.merge_and_unload()

text_encoder = CLIPTextModel(
    CLIPTextConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).cuda()
head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
with torch.no_grad():
    target = text_encoder(torch.ones(4, 16, dtype=torch.long, device="cuda"))[0]
functional.mse_loss(head(target.detach()), target).backward()
