# After an epoch the net writes samples for all prompts at once.
# cause: eval-generate · card: 120 MiB
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=4, bos_token_id=1, eos_token_id=None, pad_token_id=0)  # fmt: skip
model = LlamaForCausalLM(config).cuda()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
prompts = torch.randint(3, 1000, (256, 10), device="cuda")
for _ in range(3):
    ids = torch.randint(3, 1000, (2, 64), device="cuda")
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    opt.step()
    opt.zero_grad()
model.eval()
with torch.no_grad():
    model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=400, do_sample=False)  # <-
