"""PEFT adapters of one kind on a small Llama: python adapters.py KIND."""

import sys

import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PrefixTuningConfig, VeraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = {
    "lora": lambda: LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    "dora": lambda: LoraConfig(r=8, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM"),
    "rslora": lambda: LoraConfig(r=8, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"),
    "pissa": lambda: LoraConfig(r=8, init_lora_weights="pissa_niter_4", task_type="CAUSAL_LM"),
    "ia3": lambda: IA3Config(task_type="CAUSAL_LM"),
    "loha": lambda: LoHaConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "vera": lambda: VeraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=16, task_type="CAUSAL_LM"),
}
config = LlamaConfig(
    vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=8,
)  # fmt: skip
model = get_peft_model(LlamaForCausalLM(config).to("cuda", torch.bfloat16), KINDS[sys.argv[1]]())
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
ids = torch.randint(0, 32000, (2, 128), device="cuda")
for _ in range(5):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("adapter")
