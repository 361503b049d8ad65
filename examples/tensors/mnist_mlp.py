"""A network of two layers learns to read handwritten digits, with the training loop of the laptop's program.

Each operation is computed in the cluster. Only where a number is printed the program waits.
"""

import os
import random

from sklearn.datasets import load_digits

import loom

images, labels = load_digits(return_X_y=True)
order = random.Random(1).sample(range(len(images)), len(images))
images, labels = images[order], labels[order]
TRAINED, BATCH, EPOCHS, RATE = 1437, 32, 60, 0.3

with loom.connect() if "LOOM_URL" in os.environ else loom.local() as job:
    lt = job.tensors()
    lt.seed(0)
    x = lt.tensor(images).float() / 16
    y = lt.tensor(labels)
    w1 = (lt.randn(64, 128) * 0.125).requires_grad_()
    b1 = lt.zeros(128, requires_grad=True)
    w2 = (lt.randn(128, 10) * 0.1).requires_grad_()
    b2 = lt.zeros(10, requires_grad=True)

    def scores(x):
        return x.matmul(w1).add(b1).relu().matmul(w2).add(b2)

    for epoch in range(EPOCHS):
        for start in range(0, TRAINED, BATCH):
            batch = slice(start, min(start + BATCH, TRAINED))
            loss = lt.cross_entropy(scores(x[batch]), y[batch])
            loss.backward()
            with lt.no_grad():
                for w in (w1, b1, w2, b2):
                    w -= RATE * w.grad
                    w.grad = None
        if epoch % 20 == 19:
            print(f"epoch {epoch + 1:2}   loss {loss.item():.4f}")

    with lt.no_grad():
        right = (scores(x[TRAINED:]).argmax(1) == y[TRAINED:]).float().mean().item()
    print(f"{right:.1%} of the test digits read correctly")
raise SystemExit(0 if right >= 0.97 else "the network reads less than 97 % of the digits")
