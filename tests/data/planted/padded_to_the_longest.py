# Every batch is padded to its longest text; one text of the corpus is twelve times as long as the others.
# cause: long-sample · card: 400 MiB
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    lengths = [96 + 8 * (i % 5) for i in range(160)]
    lengths[107] = 1500

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        ids = torch.randint(1, 4000, (self.lengths[i],))
        return ids, i % 4


def pad(rows):
    texts, labels = zip(*rows)
    return pad_sequence(texts, batch_first=True), torch.tensor(labels)


class TextClassifier(nn.Module):
    def __init__(self, width=192):
        super().__init__()
        self.embed = nn.Embedding(4000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.out = nn.Linear(width, 4)

    def forward(self, ids):
        hidden = self.encoder(self.embed(ids))  # <-
        return self.out(hidden.mean(1))


device = "cuda"
net = TextClassifier().to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
for epoch in range(2):
    for ids, labels in DataLoader(Texts(), batch_size=16, collate_fn=pad):
        loss = nn.functional.cross_entropy(net(ids.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
