"""What the jobs share: a model of half a billion parameters, and samples of random tokens."""

import torch
import transformers

VOCABULARY = 32_000


def make_model(layers):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(VOCABULARY, (self.length,))
        return {"input_ids": tokens, "labels": tokens}
