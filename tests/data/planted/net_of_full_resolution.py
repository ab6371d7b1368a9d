# The forward pass of a U-Net at full resolution keeps what its backward pass needs.
# cause: activations · card: 3000 MiB
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Slides(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(3, 512, 512), torch.randint(5, (512, 512))


def double_conv(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
                         nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, classes=5, width=32, levels=4):
        super().__init__()
        sizes = [width * 2 ** level for level in range(levels)]
        self.down = nn.ModuleList(double_conv(a, b) for a, b in zip([3] + sizes[:-1], sizes))
        self.middle = double_conv(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(double_conv(a + b, b) for a, b in zip([sizes[-1]] + sizes[:0:-1], sizes[::-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def run(self, layer, x):
        return layer(x)  # <-

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = self.run(layer, x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.run(self.middle, x)
        for layer, skip in zip(self.up, reversed(skips)):
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = self.run(layer, torch.cat([x, skip], 1))
        return self.head(x)


def dice(logits, target):
    share = logits.softmax(1)
    picked = share.gather(1, target[:, None])
    return 1 - 2 * picked.sum() / (share.sum() + target.numel())


def main():
    model = UNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    for step, (images, masks) in enumerate(DataLoader(Slides(), batch_size=4, shuffle=True, drop_last=True)):
        images, masks = images.cuda(), masks.cuda()
        logits = model(images)
        loss = F.cross_entropy(logits, masks) + dice(logits, masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(step, loss.item())


if __name__ == "__main__":
    main()
