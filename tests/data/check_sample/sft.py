"""LoRA by TRL's SFTTrainer, with its settings in a file."""

import helpers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

WORDS = ["<unk>", "<pad>", "<s>", "a", "model", "learns", "from", "text"]


def tokenizer():
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<s>", unk_token="<unk>")


def main():
    arguments, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
    texts = Dataset.from_dict({"text": ["a model learns from text " * 300] * 32})
    trainer = SFTTrainer(
        helpers.make_model(8),
        args=arguments,
        train_dataset=texts,
        processing_class=tokenizer(),
        peft_config=get_peft_config(model),
    )
    trainer.train()


if __name__ == "__main__":
    main()
