"""Classification heads of the closed form against the bytes autograd saves for transformers' own classes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import memfit  # noqa: E402
from memfit.closed_form import ops  # noqa: E402
from memfit.closed_form.run.account import Account  # noqa: E402
from memfit.closed_form.style import CODES, Code  # noqa: E402
from memfit.models.families import architecture  # noqa: E402
from memfit.nouns.job import Recipe  # noqa: E402
from memfit.tables.trainers import trainer  # noqa: E402

BATCH, LENGTH = 2, 64
BERT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 5000,
}
HEADS = {
    "BertForSequenceClassification": (transformers.BertConfig, BERT),
    "BertForTokenClassification": (transformers.BertConfig, BERT),
    "RobertaForSequenceClassification": (transformers.RobertaConfig, BERT),
    "LlamaForSequenceClassification": (
        transformers.LlamaConfig, {**BERT, "num_key_value_heads": 2, "pad_token_id": 0, "head_dim": 32},
    ),
}  # fmt: skip


def forward_bytes(name: str) -> int:
    """Requested bytes alive after one forward in training, above the weights and the batch."""
    kind, words = HEADS[name]
    config = kind(**words, num_labels=3, attn_implementation="eager")
    with memfit.virtual_gpu("a100-80gb", capacity=None):
        model = getattr(transformers, name)(config).to("cuda").train()
        ids = torch.ones(BATCH, LENGTH, dtype=torch.long, device="cuda")
        labels = torch.zeros((BATCH, LENGTH) if "Token" in name else BATCH, dtype=torch.long, device="cuda")
        ids.float() @ ids.float().t()  # takes the workspace of matrix products
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        alive = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        del loss
    return int(alive)


def kept(account: Account) -> int:
    """Bytes that the forward of the closed form leaves alive."""
    return sum(account.meter.bytes(step.segment.left) for step in account.micro().until_loss.steps)


@pytest.mark.parametrize("name", HEADS)
def test_a_classifier_keeps_no_logits_over_the_vocabulary(name: str) -> None:
    kind, words = HEADS[name]
    config = {**kind(**words, num_labels=3).to_dict(), "architectures": [name]}
    recipe = Recipe(
        method="full", precision="fp32", micro_batch=BATCH, sequence_length=LENGTH, attention="eager", trainer="torch"
    )
    account = Account(architecture(config, name), recipe, memfit.find_gpu("a100-80gb"), padded=True)
    assert kept(account) == pytest.approx(
        forward_bytes(name), rel=0.025
    )  # RoBERTa drops out its first token before the dense layer, so the rest goes


def test_softmax_of_old_pytorch_keeps_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, words = HEADS["BertForSequenceClassification"]
    found = architecture({**kind(**words).to_dict(), "architectures": ["BertForSequenceClassification"]}, "bert")
    recipe = Recipe(
        method="full", precision="fp32", micro_batch=BATCH, sequence_length=LENGTH, attention="eager", trainer="torch"
    )
    gpu, row = memfit.find_gpu("a100-80gb"), trainer("torch")
    monkeypatch.setitem(CODES, "old", Code(softmax=partial(ops.softmax, keeps_input=True)))
    old = Account(found, recipe, gpu, profile=replace(row, code="old"))
    now = Account(found, recipe, gpu, profile=row)
    scores = 4 * BATCH * words["num_attention_heads"] * LENGTH * LENGTH
    assert kept(old) - kept(now) == words["num_hidden_layers"] * scores
