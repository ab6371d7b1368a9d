# Text encoder and VAE stay on the card beside the denoiser that is trained.
# cause: companion-models · card: 420 MiB
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel


class Captions(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(3, 256, 256), torch.randint(49000, (77,))


class Autoencoder(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        widths = [3, width, 2 * width, 2 * width]
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.SiLU()) for a, b in zip(widths, widths[1:])),
                                     nn.Conv2d(2 * width, 4, 1))
        self.decoder = nn.Sequential(nn.Conv2d(4, 2 * width, 1), *(nn.Sequential(
            nn.ConvTranspose2d(b, a, 4, 2, 1), nn.SiLU()) for a, b in reversed(list(zip(widths, widths[1:])))))

    def encode(self, images):
        return self.encoder(images) * 0.18215


class Denoiser(nn.Module):
    def __init__(self, width=256, depth=4, text=512):
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, width, 2, 2), nn.ConvTranspose2d(width, 4, 2, 2)
        self.text, self.time = nn.Linear(text, width), nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(nn.TransformerDecoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(depth))

    def forward(self, latents, t, text):
        h = self.stem(latents)
        x, text = h.flatten(2).transpose(1, 2) + self.time(t)[:, None], self.text(text)
        for block in self.blocks:
            x = block(x, text)
        return self.head(x.transpose(1, 2).unflatten(2, h.shape[2:]))


class Conditioning:
    def __init__(self):
        config = CLIPTextConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=8)
        self.text = CLIPTextModel(config).requires_grad_(False).eval().to("cuda")  # <-
        self.vae = Autoencoder().requires_grad_(False).eval().to("cuda")

    @torch.no_grad()
    def __call__(self, images, tokens):
        return self.vae.encode(images.cuda()), self.text(tokens.cuda()).last_hidden_state


def batches(loader, condition):
    return (condition(*batch) for batch in loader)


def main():
    prepared = batches(DataLoader(Captions(), 4), Conditioning())
    model = Denoiser().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    for latents, text in prepared:
        noise, t = torch.randn_like(latents), torch.randint(1000, (len(latents),), device="cuda")
        loss = F.mse_loss(model(latents + noise, t, text), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
