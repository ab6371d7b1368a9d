"""Train LoRA adapters of the attention beside frozen 4-bit layers."""

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
for block in model.model.layers:
    for part in (block.self_attn, block.mlp):
        for name, child in list(part.named_children()):
            if isinstance(child, torch.nn.Linear):
                frozen = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, quant_type="nf4")
                setattr(part, name, frozen)
model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"])).to("cuda")
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for _ in range(2):
    ids = torch.randint(0, 1024, (2, 2048), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
