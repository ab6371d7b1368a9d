"""A loop with accelerate: accumulation, clipping and a saved state."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = DataLoader(TensorDataset(torch.randn(1000, 512), torch.randint(0, 10, (1000,))), batch_size=16, num_workers=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for epoch in range(2):
    for x, y in data:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print("epoch", epoch, loss.item())
accelerator.save_state("accelerated-state")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "accelerated.pt")
