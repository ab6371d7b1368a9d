# Validation takes all of its set as one batch, without gradients, after training in batches of 64.
# cause: eval-batch · card: 300 MiB
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64 * 7 * 7, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.c1(x)), 2)  # <-
        x = torch.max_pool2d(torch.relu(self.c2(x)), 2)
        return self.fc(x.flatten(1))


full = TensorDataset(torch.rand(6000, 1, 28, 28), torch.randint(0, 10, (6000,)))
train_set, val_set = random_split(full, [3000, 3000])
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
val_loader = DataLoader(val_set, batch_size=len(val_set))
net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())


def validate():
    net.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in val_loader:
            correct += (net(images.cuda()).argmax(1) == labels.cuda()).sum().item()
    return correct / len(val_set)


for epoch in range(3):
    net.train()
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(net(images.cuda()), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, validate())
