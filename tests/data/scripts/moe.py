"""A small mixture of experts from a config: python moe.py FAMILY EXPERTS_IMPLEMENTATION."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

family, experts = sys.argv[1:]
sizes = {
    "vocab_size": 32000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 512, "output_router_logits": True, "head_dim": 32,
}  # fmt: skip
config = AutoConfig.for_model(family, **sizes)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=experts).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(0, 32000, (2, 128), device="cuda")
for _ in range(5):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
