"""TRL's DPOTrainer on a small Llama made from a config."""

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

words = Tokenizer(
    models.WordLevel({w: i for i, w in enumerate(["<unk>", "<pad>", "<s>", "yes", "no"])}, unk_token="<unk>")
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<s>")
config = LlamaConfig(
    vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, pad_token_id=1, bos_token_id=2, eos_token_id=2,
)  # fmt: skip
model = LlamaForCausalLM(config).to("cuda")
data = Dataset.from_list([{"prompt": "yes ", "chosen": "yes no " * 50, "rejected": "no " * 30}] * 64)
arguments = DPOConfig(
    "dpo-output", per_device_train_batch_size=4, gradient_accumulation_steps=1, max_length=128, bf16=True, report_to=[],
    gradient_checkpointing=False,
)  # fmt: skip
trainer = DPOTrainer(
    model=model, args=arguments, train_dataset=data, processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)  # fmt: skip
trainer.train()
