"""A LightningCLI program, as Lightning's documentation has it, with the demo classes that Lightning ships."""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel


def cli_main():
    cli = LightningCLI(DemoModel, BoringDataModule)  # noqa: F841 - as the page has it
    # note: don't call fit!!


if __name__ == "__main__":
    cli_main()
    # note: it is good practice to implement the CLI in a function and execute it in the main if block
