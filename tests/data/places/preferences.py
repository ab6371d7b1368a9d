"""DPO with a reference model, on tokens that are ready."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl import DPOConfig, DPOTrainer

words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "<unk>": 3}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
config = Qwen2Config(
    vocab_size=4000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
policy, reference = (AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16) for _ in range(2))
data = Dataset.from_dict({"prompt": ["a a a"] * 8, "chosen": ["a " * 30] * 8, "rejected": ["a " * 20] * 8})
settings = DPOConfig(sys.argv[1], per_device_train_batch_size=4, max_steps=1, report_to="none", disable_tqdm=True)
DPOTrainer(model=policy, ref_model=reference, args=settings, train_dataset=data, processing_class=tokenizer).train()
