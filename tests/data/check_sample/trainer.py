"""Full fine-tuning by transformers' Trainer with a loss of its own."""

import argparse

import helpers
import torch
from transformers import Trainer, TrainingArguments


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    told = parser.parse_args()
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_checkpointing=True,
        num_train_epochs=told.epochs,
        save_strategy="no",
        report_to=[],
    )
    OwnLoss(helpers.make_model(8), arguments, train_dataset=helpers.RandomTokens(1024)).train()


if __name__ == "__main__":
    main()
