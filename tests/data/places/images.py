"""Images: a transformer with fused attention, and a network of convolutions under accelerate in 16 bits."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

vit = ViTForImageClassification(
    ViTConfig(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3, num_labels=10)
).cuda()
optimizer = torch.optim.AdamW(vit.parameters())
images, labels = torch.randn(4, 3, 224, 224, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
loss = functional.cross_entropy(vit(pixel_values=images).logits, labels)
loss.backward()
torch.nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
optimizer.step()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3)))


accelerator = Accelerator(mixed_precision="bf16")
loader = DataLoader(TensorDataset(torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)), batch_size=4)
net = Net()
net, sgd, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loader)
for x, y in loader:
    loss = nn.functional.cross_entropy(net(x), y)
    accelerator.backward(loss)
    sgd.step()
    sgd.zero_grad()
