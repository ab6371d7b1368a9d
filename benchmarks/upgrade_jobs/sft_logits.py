"""Train a small model with a large vocabulary by TRL's SFTTrainer."""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

config = LlamaConfig(
    vocab_size=32000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
words = {f"w{i}": i for i in range(100)} | {"<eos>": 100, "<unk>": 101}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
data = Dataset.from_list([{"input_ids": [i % 100 for i in range(1024)]} for _ in range(16)])
args = SFTConfig(
    tempfile.mkdtemp(),
    max_steps=2,
    per_device_train_batch_size=2,
    bf16=True,
    max_length=1024,
    gradient_checkpointing=False,
    report_to=[],
    save_strategy="no",
)
SFTTrainer(LlamaForCausalLM(config), args=args, train_dataset=data, processing_class=tokenizer).train()
