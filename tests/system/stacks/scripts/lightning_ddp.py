"""Train an autoencoder on two processes: https://lightning.ai/docs/pytorch/stable/starter/introduction.html."""

import argparse

import lightning as L
import torch
from torch import nn, optim, utils


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 64))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x), sync_dist=True)

    def configure_optimizers(self):
        optimizer = optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": optim.lr_scheduler.ExponentialLR(optimizer, 0.9999), "interval": "step"}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=16)
    arguments = parser.parse_args()

    L.seed_everything(1)
    data = utils.data.TensorDataset(torch.rand(4096, 64))
    train_loader = utils.data.DataLoader(data, batch_size=8)
    val_loader = utils.data.DataLoader(utils.data.TensorDataset(torch.rand(64, 64)), batch_size=8)
    trainer = L.Trainer(
        default_root_dir=arguments.root,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=arguments.max_steps,
        check_val_every_n_epoch=10,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(LitAutoEncoder(arguments.width), train_loader, val_loader)
    if trainer.is_global_zero:
        print(f"trained to step {trainer.global_step}")


if __name__ == "__main__":
    main()
