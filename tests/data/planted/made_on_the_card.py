# The weights of a model that is made on the card are more than it has.
# cause: capacity · card: 500 MiB
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=8000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=8)
with torch.device("cuda"):
    LlamaForCausalLM(config)  # <-
