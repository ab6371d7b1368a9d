# The encoders that make a small model's inputs fill the card; all three are attributes of one object.
# cause: companion-models · card: 120 MiB
def mlp(width, depth):
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())])


class Pipeline:
    def __init__(self):
        self.unet = mlp(256, 2).to("cuda")
        self.vae = mlp(1024, 20).requires_grad_(False).eval().to("cuda")  # <-
        self.text_encoder = mlp(1024, 4).requires_grad_(False).eval().to("cuda")


pipe = Pipeline()
optimizer = torch.optim.AdamW(pipe.unet.parameters())
for _ in range(3):
    with torch.no_grad():
        latents = pipe.text_encoder(pipe.vae(torch.randn(2048, 1024, device="cuda")))[:, :256]
    F.mse_loss(pipe.unet(latents), latents).backward()
    optimizer.step()
    optimizer.zero_grad()
