"""Fine-tune a Hugging Face model under a byte budget.

    python examples/huggingface.py

The model is a GPT-2 with random weights, so that nothing is downloaded. Replace it by `from_pretrained(...)`, and the
random tokens by your data: nothing else changes.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memgraph

STEPS, BATCH, LENGTH = 4, 8, 128

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=1000))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(0, 1000, (STEPS, BATCH, LENGTH))

# The peak of a plain step. No step is run for this.
plain = memgraph.plan(model, input_ids=tokens[0], labels=tokens[0], optimizer=optimizer)
budget = int(0.6 * plain.peak)
print(f"a plain step needs {plain.peak / 1e6:.1f} MB; it gets {budget / 1e6:.1f} MB")

compiled = memgraph.compile(model, budget, optimizer=optimizer, time_limit=5)
for batch in tokens:
    loss = compiled(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")

print(compiled.plan)
