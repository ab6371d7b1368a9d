# The averaged model of SWA is a whole second model on the card.
# cause: two-copies · card: 450 MiB
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, SWALR
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randn(3, 64, 64), index % 100


class ViT(nn.Module):
    def __init__(self, width=512, depth=10, classes=100):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.encoder(x)[:, 0])


class Trainer:
    def __init__(self, model, swa_start=1, epochs=3):
        self.model = model.cuda()
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
        self.swa_start, self.epochs = swa_start, epochs
        self.average, self.schedule = None, SWALR(self.optimizer, 0.01, anneal_epochs=2)

    def train_epoch(self, loader):
        self.model.train()
        for images, labels in loader:
            loss = F.cross_entropy(self.model(images.cuda()), labels.cuda(), label_smoothing=0.1)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, net, loader):
        net.eval()
        return sum((net(images.cuda()).argmax(-1) == labels.cuda()).sum().item() for images, labels in loader)

    def fit(self, train, val):
        for epoch in range(self.epochs):
            self.train_epoch(train)
            if epoch >= self.swa_start:
                if self.average is None:
                    self.average = AveragedModel(self.model)  # <-
                self.average.update_parameters(self.model)
                self.schedule.step()
            print("epoch", epoch, "right", self.evaluate(self.model, val))


def main():
    trainer = Trainer(ViT())
    trainer.fit(DataLoader(Images(32), 4, shuffle=True), DataLoader(Images(16), 4))


if __name__ == "__main__":
    main()
