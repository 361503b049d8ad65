"""A small GPT learns to continue the texts of Python's own help, letter by letter.

It needs no torch and no numpy here.
"""

import math
import os
import random
from pydoc_data.topics import topics

import loom

STEPS, BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 200, 16, 64, 64, 4, 2
text = "".join(topics[name] for name in ("for", "with", "try", "while", "class"))
letters = sorted(set(text))
codes = [letters.index(each) for each in text]

with loom.connect() if "LOOM_URL" in os.environ else loom.local() as job:
    lt = job.tensors()
    lt.seed(0)
    nn = lt.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.between = nn.LayerNorm(WIDTH)
            self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x):
            seen = self.before(x)
            x = x + self.attention(seen, seen, seen, need_weights=False, is_causal=True)[0]
            return x + self.wide(self.between(x))

    class Letters(nn.Module):
        def __init__(self):
            super().__init__()
            self.letter, self.place = nn.Embedding(len(letters), WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.last, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters))

        def forward(self, x):
            return self.scores(self.last(self.blocks(self.letter(x) + self.place(lt.arange(x.shape[1])))))

    model = Letters()
    optimizer = lt.optim.AdamW(model.parameters(), lr=3e-3)
    learned = lt.tensor(codes)
    drawn = random.Random(0)
    for step in range(STEPS):
        starts = lt.tensor([[drawn.randrange(len(codes) - CONTEXT - 1)] for _ in range(BATCH)])
        batch = learned[starts + lt.arange(CONTEXT + 1)]
        loss = lt.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}   loss {loss.item():.3f}")

    model.eval()
    with lt.no_grad():
        written = [letters.index("\n")]
        for _ in range(80):
            odds = model(lt.tensor([written[-CONTEXT:]]))[0, -1].softmax(-1).tolist()
            written += drawn.choices(range(len(letters)), odds)
    print("".join(letters[each] for each in written))
    reached = loss.item()
raise SystemExit(
    0 if reached < math.log(len(letters)) - 1.5 else f"it has not learned much: the loss is {reached:.3f}"
)
