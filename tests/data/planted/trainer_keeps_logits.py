# Compute_metrics without preprocess_logits_for_metrics: the Trainer keeps the logits of the whole evaluation.
# cause: eval-logits · card: 1800 MiB
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


VOCAB, LENGTH = 32000, 256


class Blocks(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        ids = torch.randint(VOCAB, (LENGTH,))
        return {"input_ids": ids, "labels": ids.clone()}


def compute_metrics(prediction):
    predicted, labels = prediction.predictions, prediction.label_ids
    if predicted.ndim == 3:
        predicted = predicted.argmax(-1)
    return {"accuracy": float((predicted[:, :-1] == labels[:, 1:]).mean())}


def tokens_only(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def make_trainer(folder):
    config = GPT2Config(vocab_size=VOCAB, n_embd=192, n_layer=3, n_head=6, n_positions=LENGTH, use_cache=False)
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=6, logging_steps=2,
        eval_strategy="steps", eval_steps=4, save_strategy="no", report_to=[], disable_tqdm=True, learning_rate=3e-4)
    return Trainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=Blocks(64), eval_dataset=Blocks(80),
        compute_metrics=compute_metrics)


def main():
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        trainer.train()  # <-
        print(trainer.state.log_history[-1])


if __name__ == "__main__":
    main()
