"""A small convolutional net trained by hand: GradScaler, clipping, a scheduler, evaluation and a saved state dict."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(inplace=True),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(64, 10),
).to(device)
data = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
train = DataLoader(data, batch_size=args.batch, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
valid = DataLoader(data, batch_size=args.batch)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=args.epochs * len(train))
scaler = torch.amp.GradScaler("cuda")
criterion = nn.CrossEntropyLoss()


def evaluate():
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for images, labels in valid:
            logits = model(images.to(device, non_blocking=True)).softmax(-1)
            right += (logits.argmax(1).cpu() == labels).sum().item()
            seen += len(labels)
    model.train()
    return right / seen


for epoch in range(args.epochs):
    running = 0.0
    for images, labels in train:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            loss = criterion(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        running += loss.item()
    print(f"epoch {epoch}: loss {running / len(train):.3f}, accuracy {evaluate():.3f}")
torch.cuda.synchronize()
print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "plain_loop.pt")
