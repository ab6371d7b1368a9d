"""Train a model whose norms are applied after attention and MLP."""

import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

config = Olmo2Config(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
)
model = Olmo2ForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    ids = torch.randint(0, 1024, (2, 2048), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
